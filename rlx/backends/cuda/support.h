/* The kernels of the executable itself: the end of a run that may fail, inputs from pinned memory, copies that a failure cancels. */

/* What the runs on one HandleStore share. halt: 0; 1 from a failed Check on; 2 once that run has ended. */
struct rlx_watch { int halt, unused; int64_t runs; };
/* In pinned memory: the run that failed (0: none), which of its statuses, its code; the runs that have ended. */
struct rlx_report { int64_t failed, status, code, ended; };

extern "C" __global__ void rlx_end(rlx_watch* watch, rlx_status* status, int64_t count, volatile rlx_report* report) {
  rlx_begin();
  const int64_t run = ++watch->runs;
  if (watch->halt) {
    for (int i = (int)count - 1; i >= 0; i--) {
      if (status[i].code && watch->halt == 1) report->status = i, report->code = status[i].code;
      status[i].code = 0;
    }
    __threadfence_system();
    if (watch->halt == 1) report->failed = run;
    watch->halt = 2;
    __threadfence_system();
  }
  report->ended = run;
}

RLX_FN void rlx_move(unsigned char* to, const unsigned char* from, int64_t nbytes, int64_t first, int64_t step) {
  if (((uint64_t)from | (uint64_t)to) % 16) { /* an array of another library */
    for (int64_t i = first; i < nbytes; i += step) to[i] = ((const volatile unsigned char*)from)[i];
    return;
  }
  for (int64_t i = first * 16; i + 16 <= nbytes; i += step * 16) {
    uint32_t a, b, c, d;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(from + i));
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(to + i), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  }
  for (int64_t i = nbytes / 16 * 16 + first; i < nbytes; i += step) to[i] = ((const volatile unsigned char*)from)[i];
}

/* One input: where it goes, its place in a slot of the ring, and whether it stays where a run has failed. */
struct rlx_part { unsigned char* to; int64_t from, nbytes, kept; };

/* Copies the inputs of this run from the ring's next slot, and tells the host now and then. One block; `slots` is a power of two. */
extern "C" __global__ void rlx_feed(
    const rlx_part* parts, int64_t count, int64_t* turn, const unsigned char* ring, int64_t slot, int64_t slots,
    volatile int64_t* taken, const int* halt) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const int64_t now = *turn;
  const unsigned char* from = ring + (now & (slots - 1)) * slot;
  const int stay = *halt;
  for (int64_t p = 0; p < count; p++) {
    if (!(stay && parts[p].kept)) rlx_move(parts[p].to, from + parts[p].from, parts[p].nbytes, threadIdx.x, blockDim.x);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    *turn = now + 1;
    if ((now & (slots / 4 - 1)) == 0) *taken = now + 1;
  }
}

extern "C" __global__ void rlx_copy(unsigned char* to, const unsigned char* from, int64_t nbytes, const int* halt) {
  if (*halt) return;
  rlx_move(to, from, nbytes, (int64_t)blockIdx.x * blockDim.x + threadIdx.x, (int64_t)gridDim.x * blockDim.x);
}

/* Copies to pinned memory, and then tells the host that read number `now` is there. One block. */
extern "C" __global__ void rlx_tell(
    unsigned char* to, const unsigned char* from, int64_t nbytes, volatile int64_t* told, int64_t now) {
  rlx_move(to, from, nbytes, threadIdx.x, blockDim.x);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    *told = now;
  }
}

/* A router: its choices, `chosen` of `count` numbers (guesses follow them); the slots of its experts, -1 for those that are not
   resident, null if all are. `wanted`: memory of the host with these slots, which become so now; null: they change between runs. */
struct rlx_router { const int* ids; int* slots; volatile const int* wanted; int64_t chosen, count, experts; };

/* Writes what the routers chose to the ring's next entry, with a mark on experts that are not resident, and tells the host. A block
   for each router. Behind a failure no expert has been chosen. turn: entries ever written, blocks that have ended. */
extern "C" __global__ void rlx_log(
    const rlx_router* routers, int64_t* turn, unsigned char* ring, int64_t entry, int64_t entries, volatile int64_t* told,
    const int* halt) {
  rlx_begin();
  const bool failed = *halt;
  const int64_t now = *(volatile int64_t*)turn;
  int* to = (int*)(ring + now % entries * entry);
  for (int r = 0; r < blockIdx.x; r++) to += routers[r].count;
  const rlx_router own = routers[blockIdx.x];
  if (own.wanted) {
    for (int64_t i = threadIdx.x; i < own.experts; i += blockDim.x) own.slots[i] = own.wanted[i];
    __syncthreads();
  }
  for (int64_t i = threadIdx.x; i < own.count; i += blockDim.x) {
    const int id = failed ? 0x7fffffff : own.ids[i];
    const bool known = i < own.chosen && own.slots && (unsigned)id < own.experts;
    to[i] = known && own.slots[id] < 0 ? id | 1 << 30 : id;
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd((unsigned long long*)turn + 1, 1ull) == gridDim.x - 1) {
    turn[0] = now + 1, turn[1] = 0;
    __threadfence_system();
    *told = now + 1;
  }
}
