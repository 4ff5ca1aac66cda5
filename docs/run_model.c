/* Runs a library made by compiled.export_c: reads the inputs from standard input, one after the other, runs `times` times, and
   writes the outputs to standard output; what it is, to standard error.

   cc run_model.c -I folder folder/libNAME.so -Wl,-rpath,folder -o run_model && ./run_model [times [threads]] < in > out */
#include "rlx.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void describe(const char *role, const rlx_tensor *t) {
    fprintf(stderr, "%s %s %s[", role, t->name, t->dtype);
    for (size_t i = 0; i < t->rank; i++) fprintf(stderr, "%s%lld", i ? "," : "", (long long)t->dims[i]);
    fprintf(stderr, "] %zu bytes\n", t->bytes);
}

/* Resident memory of this process, by its kind: pages of files, such as weights, are shared with other processes. */
static void show_memory(void) {
    char line[256];
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f)) {
        if (!strncmp(line, "VmRSS", 5) || !strncmp(line, "Rss", 3)) fputs(line, stderr);
    }
    if (f) fclose(f);
}

int main(int count, char **words) {
    int times = count > 1 ? atoi(words[1]) : 1, threads = count > 2 ? atoi(words[2]) : 0;
    char error[512];
    rlx_model *model = rlx_open(threads, error, sizeof error);
    if (!model) {
        fprintf(stderr, "%s\n", error);
        return 1;
    }
    for (size_t i = 0; i < rlx_input_count(model); i++) {
        const rlx_tensor *t = rlx_input(model, i);
        describe("input", t);
        if (fread(rlx_input_data(model, i), 1, t->bytes, stdin) != t->bytes) {
            fprintf(stderr, "standard input ends before %s is complete\n", t->name);
            return 1;
        }
    }
    for (int n = 0; n < times; n++) {
        if (rlx_run(model)) {
            fprintf(stderr, "%s\n", rlx_error(model));
            return 1;
        }
    }
    for (size_t i = 0; i < rlx_output_count(model); i++) {
        describe("output", rlx_output(model, i));
        fwrite(rlx_output_data(model, i), 1, rlx_output(model, i)->bytes, stdout);
    }
    for (size_t i = 0; i < rlx_state_count(model); i++) {
        describe("state", rlx_state(model, i));
        fwrite(rlx_state_data(model, i), 1, rlx_state(model, i)->bytes, stdout);
    }
    fprintf(stderr, "model %zu bytes, weights %zu bytes\n", rlx_model_bytes(model), rlx_weight_bytes());
    show_memory();
    rlx_close(model);
    return 0;
}
