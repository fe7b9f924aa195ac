/* Packets: each operation has a slot for every writer at every rank, in buffer (operation modulo BUFFERS). A rank writes
   to the others, then reads the packets of the others; no packet may be overwritten before the read. ONE_WAY: only
   rank 0 writes, and only the other ranks wait, as in a broadcast. */
#ifndef RANKS
#define RANKS 3
#endif
#ifndef BUFFERS
#define BUFFERS 2
#endif
#define OPERATIONS 4
#define SLOT(owner, writer) slot[((owner) * BUFFERS + number % BUFFERS) * RANKS + (writer)]
#ifdef ONE_WAY
#define WRITES(rank) ((rank) == 0)
#else
#define WRITES(rank) true
#endif

byte slot[RANKS * RANKS * BUFFERS];

proctype rank(byte me) {
    byte number, peer;
    for (number : 1 .. OPERATIONS) {
        for (peer : 0 .. RANKS - 1) {
            if
            :: peer != me && WRITES(me) -> SLOT(peer, me) = number
            :: else
            fi
        }
        for (peer : 0 .. RANKS - 1) {
            if
            :: peer != me && WRITES(peer) ->
                SLOT(me, peer) >= number;
                assert(SLOT(me, peer) == number)
            :: else
            fi
        }
    }
}

init {
    byte r;
    atomic {
        for (r : 0 .. RANKS - 1) { run rank(r) }
    }
}
