/* The swap protocol: two slots, each on a node of its own that also holds the replicas of the other one; spares; nodes that die at
 * any moment, in a recovery too. Checked by spin: see docs/simulation.md and tests/sim/test_model.py.
 *
 * What is left out: time, the coordinator's own death, shared state, durable checkpoints, workers that die without their node.
 * hotswap.sim has all of that, but tries some orders; here all of them are tried.
 *
 * -DNO_GATE        nobody waits for replicas before an update
 * -DONE_VERSION    every snapshot and replica is written over the one before
 * -DNO_FENCE_CHECK what is copied after an abort has begun may become a valid snapshot
 */
#include "transitions.pml"

#ifndef LOSSES
#define LOSSES 2
#endif
#ifndef STEPS
#define STEPS 3
#endif
#define SLOTS 2
#define NODES (SLOTS + LOSSES)
#ifdef ONE_VERSION
#define KEPT 1
#else
#define KEPT VERSIONS
#endif
#define NOTHING 15
#define GARBAGE 14

/* Where a worker is. A step is computed up to MET, passes the gate at PASSED, and is whole again at COMPUTING. */
#define ABSENT 0
#define COMPUTING 1
#define MET 2
#define PASSED 3
#define WRITING 4
#define PARKED 5
#define RESTORED 6
#define FINISHED 7

byte phase = TRAINING;
byte generation = 1;
byte place[SLOTS];              /* node of each slot */
byte spares = LOSSES;           /* not yet used; the next one is node NODES - spares */
bool alive[NODES];
byte fence[NODES];              /* newest generation that the agent has accepted */
byte losses;
byte unguarded;                 /* losses since everything was last in two places */
byte committed;                 /* newest step that somebody relies on */

byte at[SLOTS];                 /* the worker: where it is, */
byte step[SLOTS];               /* updates done, */
byte history[SLOTS];            /* and the generation in which the last one was computed */
bool torn[SLOTS];
bool held[SLOTS];               /* whether the process has a state of the job at all */
byte met[SLOTS];                /* newest step whose gradients it has reduced in this generation, + 1 */
byte gate[SLOTS];               /* newest step whose gate it has entered in this generation, + 1 */
byte acked[SLOTS];              /* newest step whose replica is acknowledged in this generation, + 1 */
bool connected[SLOTS];
bool ready[SLOTS];
byte resume_step;

byte own_step[NODES * VERSIONS];
byte own_history[NODES * VERSIONS];
byte kept_step[NODES * VERSIONS];
byte kept_history[NODES * VERSIONS];
byte push_step[SLOTS];          /* a replica under way: NOTHING if there is none */
byte push_history[SLOTS];
byte push_generation[SLOTS];
byte writes_to[SLOTS];          /* the cell that a snapshot under way goes to */

#define OTHER(s) (1 - (s))
#define HOLDER(s) place[OTHER(s)]
#define TOLD(s) (fence[place[s]] == generation)
#define GONE(s) (!alive[place[s]])

/* A transition of the coordinator: refused where the production table does not have it. */
inline enter(kind, next) {
  assert(MAY(phase, kind, next));
  phase = next
}

/* The cell for the next version: an empty one, else the oldest. */
#define OLDEST(step_of, node) \
  (KEPT == 1 || step_of[(node) * VERSIONS] == NOTHING || \
   (step_of[(node) * VERSIONS + 1] != NOTHING && step_of[(node) * VERSIONS] < step_of[(node) * VERSIONS + 1]) \
   -> (node) * VERSIONS : (node) * VERSIONS + 1)
#define HAS(step_of, node, k) \
  (step_of[(node) * VERSIONS] == (k) || (KEPT > 1 && step_of[(node) * VERSIONS + 1] == (k)))
#define CELL(step_of, node, k) \
  (step_of[(node) * VERSIONS] == (k) -> (node) * VERSIONS : (node) * VERSIONS + 1)
#define RESTORABLE(s, k) \
  ((held[s] && step[s] == (k) && !torn[s] && HAS(own_step, place[s], k)) || \
   HAS(own_step, place[s], k) || (alive[HOLDER(s)] && HAS(kept_step, HOLDER(s), k)))

inline forget_beyond(node, k) {
  i = 0;
  do
  :: i < VERSIONS ->
    if
    :: own_step[node * VERSIONS + i] != NOTHING && own_step[node * VERSIONS + i] > k -> own_step[node * VERSIONS + i] = NOTHING
    :: else
    fi;
    if
    :: kept_step[node * VERSIONS + i] != NOTHING && kept_step[node * VERSIONS + i] > k -> kept_step[node * VERSIONS + i] = NOTHING
    :: else
    fi;
    i++
  :: else -> break
  od;
  i = 0
}

/* The session of one slot, and what its agent does with its snapshots. */
proctype worker(byte s) {
  byte cell = 0;
  bool has_room = false;
  do
  /* Gradients: whoever is through knows that the other one has computed the same step. */
  :: atomic { at[s] == COMPUTING && TOLD(s) && !GONE(s) && step[s] < STEPS && met[s] <= step[s] -> met[s] = step[s] + 1 }
  :: atomic { at[s] == COMPUTING && TOLD(s) && !GONE(s) && met[s] == step[s] + 1 && met[OTHER(s)] >= step[s] + 1 ->
       assert(step[OTHER(s)] > step[s] || history[s] == history[OTHER(s)]); at[s] = MET }
  /* The commit gate: entered with an acknowledged replica, however far the step is; passed when the other one has entered it. */
#ifdef NO_GATE
  :: atomic { at[s] == MET && TOLD(s) && !GONE(s) -> at[s] = PASSED; torn[s] = true }
#else
  :: atomic { (at[s] == COMPUTING || at[s] == MET) && TOLD(s) && !GONE(s) && step[s] < STEPS && gate[s] <= step[s] &&
              acked[s] == step[s] + 1 -> gate[s] = step[s] + 1 }
  :: atomic { at[s] == MET && TOLD(s) && !GONE(s) && gate[s] == step[s] + 1 && gate[OTHER(s)] >= step[s] + 1 ->
       committed = (step[s] > committed -> step[s] : committed); at[s] = PASSED; torn[s] = true }
#endif
  /* The snapshot: what was in the buffer no longer counts, then it is whole. It becomes valid or the abort begins: never both. */
  :: atomic { at[s] == PASSED && TOLD(s) && !GONE(s) ->
       writes_to[s] = OLDEST(own_step, place[s]); own_step[writes_to[s]] = NOTHING; at[s] = WRITING }
  :: atomic { at[s] == WRITING && TOLD(s) && !GONE(s) && push_step[s] == NOTHING ->
       step[s]++; history[s] = generation; torn[s] = false;
       own_step[writes_to[s]] = step[s]; own_history[writes_to[s]] = history[s];
       push_step[s] = step[s]; push_history[s] = history[s]; push_generation[s] = generation; at[s] = COMPUTING }
#ifdef NO_FENCE_CHECK
  :: atomic { at[s] == WRITING && !GONE(s) && fence[place[s]] < generation ->
       own_step[writes_to[s]] = step[s] + 1; own_history[writes_to[s]] = GARBAGE }
#endif
  /* A replica: it makes room first, and counts when it is whole, unless the holder has left its generation by then. */
  :: atomic { push_step[s] != NOTHING && !has_room && !GONE(s) && alive[HOLDER(s)] && push_generation[s] >= fence[HOLDER(s)] &&
              !HAS(kept_step, HOLDER(s), push_step[s]) ->
       cell = OLDEST(kept_step, HOLDER(s)); kept_step[cell] = NOTHING; cell = 0; has_room = true }
  :: atomic { push_step[s] != NOTHING && !GONE(s) && alive[HOLDER(s)] && push_generation[s] >= fence[HOLDER(s)] ->
       cell = (HAS(kept_step, HOLDER(s), push_step[s]) -> CELL(kept_step, HOLDER(s), push_step[s]) : OLDEST(kept_step, HOLDER(s)));
       kept_step[cell] = push_step[s]; kept_history[cell] = push_history[s]; cell = 0;
       if
       :: push_generation[s] == generation && TOLD(s) -> acked[s] = push_step[s] + 1
       :: else
       fi;
       push_step[s] = NOTHING; has_room = false }
  /* A fence: the agent accepts it, the worker parks where it stands. */
  :: atomic { !GONE(s) && fence[place[s]] < generation ->
       fence[place[s]] = generation; push_step[s] = NOTHING; acked[s] = 0; met[s] = 0; gate[s] = 0;
       at[s] = PARKED; has_room = false }
  /* A plan: groups form, the state is fetched and replicated again. */
  :: atomic { phase == REBUILDING && at[s] == PARKED && TOLD(s) && !GONE(s) && !connected[s] -> connected[s] = true }
  :: atomic { phase == RESTORING && at[s] == PARKED && TOLD(s) && !GONE(s) &&
              (HAS(own_step, place[s], resume_step) || alive[HOLDER(s)]) ->
       if
       :: HAS(own_step, place[s], resume_step) -> history[s] = own_history[CELL(own_step, place[s], resume_step)]
       :: else ->
         assert(HAS(kept_step, HOLDER(s), resume_step));
         history[s] = kept_history[CELL(kept_step, HOLDER(s), resume_step)];
         cell = OLDEST(own_step, place[s]); own_step[cell] = resume_step; own_history[cell] = history[s]; cell = 0
       fi;
       assert(history[s] != GARBAGE);
       step[s] = resume_step; torn[s] = false; held[s] = true; at[s] = RESTORED;
       push_step[s] = resume_step; push_history[s] = history[s]; push_generation[s] = generation }
  :: atomic { at[s] == RESTORED && TOLD(s) && !GONE(s) && acked[s] == step[s] + 1 && !ready[s] -> ready[s] = true }
  :: atomic { at[s] == RESTORED && TOLD(s) && !GONE(s) && (phase == REDOING || phase == TRAINING) -> at[s] = COMPUTING }
  /* The end: a last gate, after which no loss can take the last step back. */
  :: atomic { at[s] == COMPUTING && step[s] == STEPS && TOLD(s) && !GONE(s) && acked[s] == STEPS + 1 && gate[s] <= STEPS ->
       gate[s] = STEPS + 1 }
  :: atomic { at[s] == COMPUTING && step[s] == STEPS && TOLD(s) && !GONE(s) && gate[s] == STEPS + 1 && gate[OTHER(s)] == STEPS + 1 ->
       committed = STEPS; at[s] = FINISHED }
  :: at[s] == FINISHED && at[OTHER(s)] == FINISHED -> break
  :: phase == STOPPED -> break
  od
}

/* A higher generation, with spares in the places of the lost. */
inline recover(kind) {
  i = 0;
  do
  :: i < SLOTS ->
    if
    :: GONE(i) && spares > 0 ->
      place[i] = NODES - spares; spares--; held[i] = false; torn[i] = false; at[i] = PARKED; push_step[i] = NOTHING
    :: else
    fi;
    connected[i] = false; ready[i] = false;
    i++
  :: else -> break
  od;
  i = 0;
  generation++;
  if
  :: GONE(0) || GONE(1) -> enter(kind, STOPPED)
  :: else -> enter(kind, FENCING)
  fi
}

inline choose() {
  resume_step = NOTHING;
  i = STEPS + 1;
  do
  :: i > 0 ->
    i--;
    if
    :: resume_step == NOTHING && RESTORABLE(0, i) && RESTORABLE(1, i) -> resume_step = i
    :: else
    fi
  :: else -> break
  od
}

#define LOST (GONE(0) || GONE(1))
#define OVER (at[0] == FINISHED && at[1] == FINISHED)

proctype coordinator() {
  byte i = 0;
  do
  :: atomic { phase != STOPPED && LOST && !OVER -> recover(NODE_GONE) }
  :: atomic { phase == FENCING && !LOST && TOLD(0) && TOLD(1) && at[0] == PARKED && at[1] == PARKED ->
       choose();
       /* One loss takes nothing that anybody relies on, wherever it strikes. */
       assert(unguarded > 1 || (resume_step != NOTHING && resume_step >= committed));
       if
       :: resume_step == NOTHING -> enter(NODE_FENCED, STOPPED)
       :: else ->
         committed = (resume_step < committed -> resume_step : committed);
         forget_beyond(place[0], resume_step); forget_beyond(place[1], resume_step);
         enter(NODE_FENCED, REBUILDING)
       fi }
  :: atomic { phase == REBUILDING && connected[0] && connected[1] -> enter(WORKER_CONNECTED, RESTORING) }
  :: atomic { phase == RESTORING && ready[0] && ready[1] && !LOST ->
       /* Everyone stands at the same step of the same history, and it is in two places again. */
       assert(step[0] == step[1] && history[0] == history[1]);
       unguarded = 0;
       enter(WORKER_READY, REDOING) }
  :: atomic { phase == REDOING && acked[0] > resume_step + 1 && acked[1] > resume_step + 1 -> enter(HEARTBEAT, TRAINING) }
  :: phase == STOPPED || OVER -> break
  od
}

/* Any node of the job may die, at any moment. */
proctype death() {
  byte s = 0;
  do
  :: atomic { losses < LOSSES && !OVER && (!GONE(0) || !GONE(1)) ->
       if
       :: !GONE(0) -> s = 0
       :: !GONE(1) -> s = 1
       fi;
       alive[place[s]] = false; at[s] = ABSENT; held[s] = false; losses++; unguarded++ }
  :: break
  od
}

init {
  atomic {
    byte n = 0;
    do
    :: n < NODES -> alive[n] = true; n++
    :: else -> break
    od;
    n = 0;
    do
    :: n < NODES * VERSIONS -> own_step[n] = NOTHING; kept_step[n] = NOTHING; n++
    :: else -> break
    od;
    n = 0;
    do
    :: n < SLOTS ->
      place[n] = n; fence[n] = generation; at[n] = COMPUTING; held[n] = true; acked[n] = 1; push_step[n] = NOTHING;
      own_step[n * VERSIONS] = 0; own_history[n * VERSIONS] = 0;
      kept_step[n * VERSIONS] = 0; kept_history[n * VERSIONS] = 0;
      n++
    :: else -> break
    od;
    run worker(0); run worker(1); run coordinator(); run death()
  }
}

/* Whatever happens, training comes to its end, or stops because the state is gone. */
ltl live { <> (OVER || phase == STOPPED) }
