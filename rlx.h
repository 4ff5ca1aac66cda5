/* The C interface of a compiled graph: a shared library made by `compiled.export_c(folder)`. It needs no Python.

   A model has its own memory and states, and worker threads if it is opened with more than one. One thread at a time may use a
   model; threads may use models of their own, which share the weights. See docs/artifacts.md. */
#ifndef RLX_H
#define RLX_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rlx_model rlx_model;

/* An input, output or state. `dtype`: f64 f32 f16 bf16 f8e4m3 f8e5m2 i64 i32 i16 i8 u64 u32 u16 u8 bool c64. Elements are
   row-major; `bytes` is the size of all of them. */
typedef struct rlx_tensor {
    const char *name;
    const char *dtype;
    size_t rank;
    const int64_t *dims;
    size_t bytes;
} rlx_tensor;

/* Open the model of this library. `threads`: 0 for as many as it was compiled for, and this process may use. Results do not depend
   on it. NULL: it failed, and `error` (of `room` bytes, may be NULL) has the reason: the processor lacks an instruction set, or
   there is no memory. States begin at zero. */
rlx_model *rlx_open(int threads, char *error, size_t room);

/* Close a model and free its memory. NULL is fine. */
void rlx_close(rlx_model *model);

/* The number of inputs, outputs and states, and their descriptions; NULL past the last one. */
size_t rlx_input_count(const rlx_model *model);
size_t rlx_output_count(const rlx_model *model);
size_t rlx_state_count(const rlx_model *model);
const rlx_tensor *rlx_input(const rlx_model *model, size_t index);
const rlx_tensor *rlx_output(const rlx_model *model, size_t index);
const rlx_tensor *rlx_state(const rlx_model *model, size_t index);

/* Where each run reads an input, until it is set again: `bytes` of its description at `data`. NULL: in the input's own memory, as
   at first. 0, or -1: there is no such input. */
int rlx_set_input(rlx_model *model, size_t index, const void *data);

/* The input's own memory, to be filled in place; runs may change it. The output of the last run. A state, between runs; it may be
   written. NULL: there is no such one. The addresses are fixed. */
void *rlx_input_data(rlx_model *model, size_t index);
const void *rlx_output_data(const rlx_model *model, size_t index);
void *rlx_state_data(rlx_model *model, size_t index);

/* For graphs compiled with an active dim: only the first `rows` of it hold data. 0: all of them. 0, or -1. */
int rlx_set_rows(rlx_model *model, int64_t rows);

/* Run once. 0; or -1: an index was out of range, and every state is as before. */
int rlx_run(rlx_model *model);

/* Why the last call that returned -1 failed. */
const char *rlx_error(const rlx_model *model);

/* Bytes of this model: its arena, scratch and states; and of the weights, which all models of the library share. */
size_t rlx_model_bytes(const rlx_model *model);
size_t rlx_weight_bytes(void);

#ifdef __cplusplus
}
#endif

#endif
