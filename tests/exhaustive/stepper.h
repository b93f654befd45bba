// Between the search (stepper.cpp) and what it searches (ring_actors.cpp).
//
// ring_actors.cpp is compiled with -fsanitize=thread, so that every access of the verbs in ext/include to memory calls a
// function of stepper.cpp, which stops the actor there. One step is thus one load, store or compare-and-swap of the
// real code, and the order of the steps of all actors is the search's.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum Actor : int { FIRST, SECOND, WORKER, OWNER, ACTORS };
enum Wait : int { NOTHING, BELL, ROOM, DEATH, STILL, ANSWER, WORK };

struct Range {
    void *at;
    size_t bytes;
};

// Of the scenario, from the command line.
struct Scenario {
    uint32_t slots, max_rows;
    uint32_t rows[2], requests[2];      // of each producer
    uint32_t gives_up[2];               // 0: waits for each answer, 1: abandons each lease, 2: drops it
    uint32_t deaths;                    // a bit for each actor that may die; one does in a run
    uint32_t reborn;                    // a producer that died starts again
    uint32_t words;                     // messages and doorbells; else all wait for what they need by themselves
    uint32_t looks;                     // of the owner, for rows that were lost
};
extern Scenario scenario;

// --- stepper.cpp, for actors ---------------------------------------------------------------------
// A verb ends, or begins: all that the actor knows from here on is in the arguments.
void boundary(int place, uint64_t a = 0, uint64_t b = 0, uint64_t c = 0);
void wait_until(Wait what);             // the actor goes on when it is so
void spawn(int actor);                  // starts again from its beginning
int dead_actor();
uint32_t moving();                      // a bit for each actor that stands before a step and waits for nothing
[[noreturn]] void violated(const char *what);

// Accesses in its scope are no steps.
struct Quiet {
    Quiet();
    ~Quiet();
};

// --- ring_actors.cpp, for the search -------------------------------------------------------------
void world_begin();
void run_actor(int actor);              // its program; returns when it is over
void check_end();                       // nobody can go on
bool is_ready(int actor, Wait what);    // called by the search
void died(int actor);
Range world_memory();                   // all that is turned back with a step
Range shared_memory();                  // of it, what other processes see
bool is_quiet(const void *at);          // an access that no other depends on
const char *place_of(const void *at);   // for a trace
