/* Slots and credits: two ranks send each other PIECES in a round, by DEPTH slots each way, in any possible order.
   ONE_WAY: only rank 0 sends. NO_CREDIT: a rank does not wait for a free slot. IN_ORDER: a rank sends everything before
   the first receive. */
#ifndef DEPTH
#define DEPTH 2
#endif
#define PIECES 5
#ifdef ONE_WAY
#define SENDS(me) ((me) == 0 -> PIECES : 0)
#define RECEIVES(me) ((me) == 1 -> PIECES : 0)
#else
#define SENDS(me) PIECES
#define RECEIVES(me) PIECES
#endif
#ifdef NO_CREDIT
#define FREE(me) true
#else
#define FREE(me) (sent - consumed[me] < DEPTH)
#endif
#ifdef IN_ORDER
#define TURN(me) (sent == SENDS(me))
#else
#define TURN(me) true
#endif

byte slot[2 * DEPTH];  /* at the receiver */
byte arrived[2];       /* at the receiver, written by the sender */
byte consumed[2];      /* at the sender, written by the receiver */

proctype rank(byte me) {
    byte sent, received;
    do
    :: sent < SENDS(me) && FREE(me) ->
        slot[(1 - me) * DEPTH + sent % DEPTH] = sent + 1;
        sent++;
        arrived[1 - me] = sent
    :: received < RECEIVES(me) && TURN(me) && arrived[me] > received ->
        assert(slot[me * DEPTH + received % DEPTH] == received + 1);
        received++;
        consumed[1 - me] = received
    :: sent == SENDS(me) && received == RECEIVES(me) -> break
    od
}

init {
    atomic { run rank(0); run rank(1) }
}
