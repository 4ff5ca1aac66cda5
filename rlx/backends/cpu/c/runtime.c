/* The runtime of an exported graph. rlx.backends.cpu.export writes the tables that it includes, with the structures of the executor
   (Step, Run, Control) and the machine code's declarations. */
#define _GNU_SOURCE
#include "rlx.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "tables.h"

#define COUNT(table) (sizeof(table) / sizeof((table)[0]) - 1) /* each table ends with an empty row: none is empty in C */
#define HUGE_PAGE (2 << 20)

enum { IDLE_SPIN_US = 100, BUSY_SPIN_US = 50, YIELDS = 8, TRIAL = 500 };

struct rlx_model {
    char *memory; /* the arena, then states, then scratch */
    size_t bytes;
    char *states[COUNT(STATES) + 1];
    const void *given[COUNT(INPUTS) + 1];
    void **args;
    Step *steps; /* of runs, then those that undo a failed run */
    Run run;
    Control *control;
    pthread_t *workers;
    int started;
    char error[512];
};

/* -- processor ---------------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
#include <cpuid.h>

static int has(const Feature *f) {
    unsigned r[4] = {0, 0, 0, 0}; /* eax, ebx, ecx, edx */
    if (!__get_cpuid_count(f->leaf, f->subleaf, &r[0], &r[1], &r[2], &r[3]) || !(r[f->word] >> f->bit & 1)) return 0;
    unsigned low, high, a, b, c = 0, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0; /* the system saves no vector registers */
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & f->saved) == f->saved && (f->saved < 1u << 17 || !syscall(SYS_arch_prctl, 0x1023, 18)); /* ask for AMX tiles */
}
#elif defined(__aarch64__)
#include <sys/auxv.h>

static int has(const Feature *f) { return getauxval(f->leaf) >> f->bit & 1; }
#else
static int has(const Feature *f) { return f->leaf == 0; }
#endif

/* -- memory and threads ---------------------------------------------------------------------------------------------- */

static size_t aligned(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

static void *at(const rlx_model *m, Place p) {
    switch (p.kind) {
    case IN_ARENA: return m->memory + p.offset;
    case IN_STATE: return m->states[p.offset];
    default: return (char *)rlx_data + p.offset;
    }
}

typedef struct {
    Control *control;
    int64_t number;
} Worker;

static void *work(void *given) {
    Worker mine = *(Worker *)given;
    free(given);
    executor_work(mine.control, mine.number);
    return NULL;
}

static int64_t spins_per_us(Control *c) {
    int64_t best = INT64_MAX;
    for (int i = 0; i < 4; i++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        executor_spin(c, TRIAL);
        clock_gettime(CLOCK_MONOTONIC, &b);
        int64_t ns = (b.tv_sec - a.tv_sec) * 1000000000 + b.tv_nsec - a.tv_nsec;
        best = ns < best ? ns : best;
    }
    return best > 0 ? (TRIAL * 1000 + best / 2) / best + 1 : TRIAL;
}

static int usable_cpus(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
}

/* Start the workers. If the system refuses one, runs use those that did start. */
static int start(rlx_model *m, int threads) {
    Control *c = m->control = aligned_alloc(64, aligned(sizeof(Control), 64));
    m->workers = calloc(threads, sizeof *m->workers);
    if (!c || !m->workers) return -1;
    memset(c, 0, sizeof *c);
    c->threads = threads < MAX_PARTS ? threads : MAX_PARTS;
    c->yields = YIELDS;
    c->wait = (void *)syscall;
    c->sched_yield = (void *)sched_yield;
    if (threads <= usable_cpus()) {
        int64_t rate = spins_per_us(c);
        c->idle_spins = IDLE_SPIN_US * rate;
        c->busy_spins = BUSY_SPIN_US * rate;
    }
    for (int i = 1; i < threads; i++) {
        Worker *one = malloc(sizeof *one);
        if (!one) break;
        *one = (Worker){c, i};
        if (pthread_create(&m->workers[m->started], NULL, work, one)) {
            free(one);
            break;
        }
        m->started++;
    }
    c->workers = m->started;
    return 0;
}

static void fill(rlx_model *m, Step *step, const Row *rows, size_t count) {
    for (size_t i = 0; i < count; i++) {
        step[i] = (Step){(void *)rows[i].function, &m->args[rows[i].first], rows[i].tasks, rows[i].after, NULL, rows[i].again, rows[i].quiet};
    }
}

static const char *build(rlx_model *m, int threads) {
    size_t size = aligned(ARENA_BYTES, 4096), starts[COUNT(STATES) + 1];
    for (size_t i = 0; i != COUNT(STATES); i++) {
        starts[i] = size;
        size = aligned(size + STATES[i].bytes, 4096);
    }
    m->bytes = size + (size_t)threads * SCRATCH_BYTES + HUGE_PAGE;
    m->memory = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m->memory == MAP_FAILED) {
        m->memory = NULL;
        return "there is no memory for it";
    }
    if (size >= HUGE_PAGE) madvise(m->memory, m->bytes, MADV_HUGEPAGE); /* refused where there are none: small pages do as well */
    for (size_t i = 0; i != COUNT(STATES); i++) m->states[i] = m->memory + starts[i];
    m->args = malloc(sizeof PLACES);
    m->steps = malloc(sizeof(Step) * (COUNT(ROWS) + COUNT(UNDO) + 2));
    if (!m->args || !m->steps) return "there is no memory for it";
    for (size_t i = 0; i != COUNT(PLACES); i++) m->args[i] = at(m, PLACES[i]);
    fill(m, m->steps, ROWS, COUNT(ROWS));
    if (threads > 1 && start(m, threads)) return "there is no memory for its threads";
    m->run = (Run){.first = m->steps, .end = m->steps + COUNT(ROWS), .scratch = m->memory + size, .stride = SCRATCH_BYTES};
    m->run.control = m->started ? m->control : NULL;
    if (HAS_EXTENT) rlx_set_rows(m, 0);
    return NULL;
}

rlx_model *rlx_open(int threads, char *error, size_t room) {
    const char *lacks = NULL, *why = "there is no memory for it";
    rlx_model *m = NULL;
    for (size_t i = 0; i != COUNT(NEEDS) && !lacks; i++) lacks = has(&NEEDS[i]) ? NULL : NEEDS[i].name;
    if (!threads) threads = usable_cpus() < THREADS ? usable_cpus() : THREADS;
    if (threads < 1 || threads > MAX_THREADS) {
        why = "the number of threads is out of range";
    } else if (!lacks && (m = calloc(1, sizeof *m))) {
        why = build(m, threads);
    }
    if (!lacks && m && !why) return m;
    if (error && room && lacks) snprintf(error, room, "%s needs a processor with %s", TITLE, lacks);
    if (error && room && !lacks) snprintf(error, room, "%s cannot be opened: %s", TITLE, why);
    rlx_close(m);
    return NULL;
}

void rlx_close(rlx_model *m) {
    if (!m) return;
    if (m->started) executor_stop(m->control);
    for (int i = 0; i < m->started; i++) pthread_join(m->workers[i], NULL);
    if (m->memory) munmap(m->memory, m->bytes);
    free(m->workers);
    free(m->control);
    free(m->steps);
    free(m->args);
    free(m);
}

/* -- inputs, outputs, states ------------------------------------------------------------------------------------------ */

static int fail(rlx_model *m, const char *why, int64_t number) {
    snprintf(m->error, sizeof m->error, "%s: %s %lld", TITLE, why, (long long)number);
    return -1;
}

size_t rlx_input_count(const rlx_model *m) { return m ? COUNT(INPUTS) : 0; }
size_t rlx_output_count(const rlx_model *m) { return m ? COUNT(OUTPUTS) : 0; }
size_t rlx_state_count(const rlx_model *m) { return m ? COUNT(STATES) : 0; }
const rlx_tensor *rlx_input(const rlx_model *m, size_t i) { return i < rlx_input_count(m) ? &INPUTS[i] : NULL; }
const rlx_tensor *rlx_output(const rlx_model *m, size_t i) { return i < rlx_output_count(m) ? &OUTPUTS[i] : NULL; }
const rlx_tensor *rlx_state(const rlx_model *m, size_t i) { return i < rlx_state_count(m) ? &STATES[i] : NULL; }
void *rlx_input_data(rlx_model *m, size_t i) { return i < rlx_input_count(m) ? at(m, INPUT_PLACES[i]) : NULL; }
const void *rlx_output_data(const rlx_model *m, size_t i) { return i < rlx_output_count(m) ? at(m, OUTPUT_PLACES[i]) : NULL; }
void *rlx_state_data(rlx_model *m, size_t i) { return i < rlx_state_count(m) ? m->states[i] : NULL; }

int rlx_set_input(rlx_model *m, size_t i, const void *data) {
    if (i >= rlx_input_count(m)) return fail(m, "there is no input", i);
    m->given[i] = data;
    return 0;
}

int rlx_set_rows(rlx_model *m, int64_t rows) {
    if (!HAS_EXTENT) return fail(m, "was compiled without an active dim; rows:", rows);
    if (rows < 0) return fail(m, "a negative number of rows:", rows);
    if (rows > MOST_ROWS) return fail(m, "more rows than it was compiled for:", rows);
    *(int64_t *)at(m, EXTENT_PLACE) = rows ? rows : MOST_ROWS;
    return 0;
}

size_t rlx_model_bytes(const rlx_model *m) { return m->bytes; }
size_t rlx_weight_bytes(void) { return DATA_BYTES; }
const char *rlx_error(const rlx_model *m) { return m->error; }

/* -- runs ---------------------------------------------------------------------------------------------------------------- */

/* Undo the updates of states, in place, by the steps before the one that failed. */
static void undo(rlx_model *m, size_t failed) {
    Step *steps = m->steps + COUNT(ROWS);
    size_t count = 0;
    for (size_t i = 0; i != COUNT(UNDO); i++) {
        if (SAVED[i] < failed) fill(m, &steps[count++], &UNDO[i], 1);
    }
    if (count) {
        Run back = m->run;
        back.first = steps;
        back.end = steps + count;
        executor_run(&back);
    }
}

int rlx_run(rlx_model *m) {
    for (size_t i = 0; i != COUNT(INPUTS); i++) {
        void *slot = at(m, INPUT_PLACES[i]);
        if (m->given[i] && m->given[i] != slot) memmove(slot, m->given[i], INPUTS[i].bytes);
    }
    int32_t status = executor_run(&m->run);
    if (status == 0 || status == ATTEND) return 0;
    size_t failed = (Step *)m->run.failed - m->steps;
    undo(m, failed);
    snprintf(m->error, sizeof m->error, "%s: index out of range in %s; no state has changed", TITLE, ROWS[failed].name);
    return -1;
}
