/* Blocks begin in any order, a single block of each rank at a time. In each of two operations, a block meets the other
   ranks' blocks of the same number. A block draws the number from a wrapping counter, and the last block to end counts
   the operation. BY_INDEX: a block's number is fixed before the start. STALE: no block counts the operation. */
#define RANKS 2
#define BLOCKS 2
#define OPERATIONS 2

byte started[RANKS], ended[RANKS], operation[RANKS];
byte met[RANKS * BLOCKS];  /* number of meetings of a rank's block */
bool busy[RANKS];

proctype block(byte me, index) {
    byte number, peer, epoch, turn;
    for (turn : 1 .. OPERATIONS) {
        atomic { !busy[me] && ended[me] / BLOCKS + 1 == turn -> busy[me] = true }
#ifdef BY_INDEX
        number = index;
#else
        atomic { number = started[me] % BLOCKS; started[me]++ }
#endif
        epoch = operation[me] + 1;
        met[me * BLOCKS + number] = epoch;
        for (peer : 0 .. RANKS - 1) {
            met[peer * BLOCKS + number] >= epoch;
            assert(met[peer * BLOCKS + number] >= turn)
        }
        atomic {
            ended[me]++;
#ifndef STALE
            if
            :: ended[me] % BLOCKS == 0 -> operation[me] = epoch
            :: else
            fi;
#endif
            busy[me] = false
        }
    }
}

init {
    byte r, b;
    atomic {
        for (r : 0 .. RANKS - 1) {
            for (b : 0 .. BLOCKS - 1) { run block(r, b) }
        }
    }
}
