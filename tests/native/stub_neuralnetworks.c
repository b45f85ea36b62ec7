/* A small NNAPI runtime for the tests: the C interface of libneuralnetworks.so, with an
 * accelerator and a reference CPU that really compute, in floats, and can fail on demand.
 *
 * SWITCHGEAR_TEST_NNAPI, entries separated by commas:
 *   NAME=CODE[:N]  ANeuralNetworksNAME returns CODE after N calls that pass
 *   devices=none|cpu|npu     only these; the default is both
 *   lacks=CODE               the accelerator does not support this operation (repeatable)
 *   mode=lie|hang|crash      of a run: numbers that are slightly wrong, no return, abort
 *   untimed=1                durations cannot be told
 *
 * Written after the NDK's documentation of each call; the numbers of operands are checked.
 */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { OK = 0, UNEXPECTED_NULL = 3, BAD_DATA = 4, OP_FAILED = 5, BAD_STATE = 6, TOO_SMALL = 8 };
enum { TENSOR_FLOAT32 = 3, TENSOR_INT32 = 4, QUANT8 = 5, PER_CHANNEL = 11, QUANT8_SIGNED = 14 };
enum { MAX_RANK = 4, MAX_OPERANDS = 4096, MAX_OPERATIONS = 1024, MAX_ENDS = 16 };

typedef struct {
    int32_t type;
    uint32_t rank;
    const uint32_t *dims;
    float scale;
    int32_t zero_point;
} OperandType;
typedef struct { uint32_t dim, count; const float *scales; } PerChannel;
typedef struct {
    int type, rank;
    int dims[MAX_RANK];
    float scale;
    int zero_point;
    PerChannel channels;
    const void *value;
    size_t length;
    char small[128];
} Operand;
typedef struct { int code, ins, outs; int in[MAX_ENDS], out[MAX_ENDS]; } Operation;
typedef struct {
    int operands, operations, ins, outs;
    bool finished, relaxed;
    int in[MAX_ENDS], out[MAX_ENDS];
    Operand operand[MAX_OPERANDS];
    Operation operation[MAX_OPERATIONS];
} Model;
typedef struct { const char *name, *version; int type; } Device;
typedef struct { Model *model; int devices; bool finished; } Compilation;
typedef struct {
    Compilation *compilation;
    const void *in[MAX_ENDS];
    void *out[MAX_ENDS];
    bool timed, done;
    uint64_t took_ns;
} Execution;

static const Device npu = {"test-npu", "1.2", 4}, cpu = {"nnapi-reference", "1", 2};

/* The value of `name=` in the environment's n-th such entry, or NULL. */
static const char *setting(const char *name, int n)
{
    const char *at = getenv("SWITCHGEAR_TEST_NNAPI");
    size_t length = strlen(name);
    while (at && *at) {
        if (!strncmp(at, name, length) && at[length] == '=' && n-- == 0)
            return at + length + 1;
        at = strchr(at, ',');
        at += at != NULL;
    }
    return NULL;
}

static bool is_set(const char *name, const char *value)
{
    const char *found = setting(name, 0);
    size_t length = strlen(value);
    return found && !strncmp(found, value, length) && (!found[length] || found[length] == ',');
}

/* The code that this call is to return now. A new setting counts anew. */
static int fault(const char *name)
{
    static char last[512];
    static struct { const char *name; int calls; } seen[64];
    const char *all = getenv("SWITCHGEAR_TEST_NNAPI"), *found = setting(name, 0);
    if (strcmp(last, all ? all : "")) {
        snprintf(last, sizeof last, "%s", all ? all : "");
        memset(seen, 0, sizeof seen);
    }
    if (!found)
        return OK;
    int i = 0;
    while (seen[i].name && strcmp(seen[i].name, name))
        i++;
    seen[i].name = name;
    char *end;
    int code = (int)strtol(found, &end, 10), passing = *end == ':' ? atoi(end + 1) : 0;
    return seen[i].calls++ >= passing ? code : OK;
}

#define CALL(name, ...) \
    EXPORT int ANeuralNetworks##name(__VA_ARGS__); \
    EXPORT int ANeuralNetworks##name(__VA_ARGS__)
#define BEGIN(name) do { int code_ = fault(name); if (code_) return code_; } while (0)

static int device_list(const Device **list)
{
    int count = 0;
    if (!setting("devices", 0) || is_set("devices", "npu"))
        list[count++] = &npu;
    if (!setting("devices", 0) || is_set("devices", "cpu"))
        list[count++] = &cpu;
    return count;
}

CALL(_getDeviceCount, uint32_t *count)
{
    const Device *list[2];
    BEGIN("_getDeviceCount");
    *count = (uint32_t)device_list(list);
    return OK;
}

CALL(_getDevice, uint32_t index, const Device **device)
{
    const Device *list[2];
    BEGIN("_getDevice");
    if ((int)index >= device_list(list))
        return BAD_DATA;
    *device = list[index];
    return OK;
}

CALL(Device_getName, const Device *d, const char **name)
{
    BEGIN("Device_getName");
    *name = d->name;
    return OK;
}

CALL(Device_getVersion, const Device *d, const char **version)
{
    BEGIN("Device_getVersion");
    *version = d->version;
    return OK;
}

CALL(Device_getType, const Device *d, int32_t *type)
{
    BEGIN("Device_getType");
    *type = d->type;
    return OK;
}

CALL(Device_getFeatureLevel, const Device *d, int64_t *level)
{
    BEGIN("Device_getFeatureLevel");
    (void)d;
    *level = 30;
    return OK;
}

CALL(Model_create, Model **model)
{
    BEGIN("Model_create");
    *model = calloc(1, sizeof **model);
    return OK;
}

EXPORT void ANeuralNetworksModel_free(Model *model);
EXPORT void ANeuralNetworksModel_free(Model *model) { free(model); }

CALL(Model_addOperand, Model *m, const OperandType *type)
{
    BEGIN("Model_addOperand");
    if (!m || !type)
        return UNEXPECTED_NULL;
    if (m->finished)
        return BAD_STATE;
    if (type->rank > MAX_RANK || m->operands == MAX_OPERANDS)
        return BAD_DATA;
    if ((type->type == QUANT8 || type->type == QUANT8_SIGNED) && !(type->scale > 0))
        return BAD_DATA;
    if ((type->type == TENSOR_FLOAT32 || type->type < 3) && (type->scale || type->zero_point))
        return BAD_DATA;
    Operand *o = &m->operand[m->operands++];
    o->type = type->type, o->rank = (int)type->rank;
    o->scale = type->scale, o->zero_point = type->zero_point;
    for (int i = 0; i < o->rank; i++)
        o->dims[i] = (int)type->dims[i];
    return OK;
}

CALL(Model_setOperandValue, Model *m, int32_t index, const void *value, size_t length)
{
    BEGIN("Model_setOperandValue");
    if (!m || !value)
        return UNEXPECTED_NULL;
    if (m->finished)
        return BAD_STATE;
    if (index < 0 || index >= m->operands)
        return BAD_DATA;
    Operand *o = &m->operand[index];
    o->length = length;
    if (length <= sizeof o->small)
        memcpy(o->small, value, length);
    o->value = length <= sizeof o->small ? o->small : value;
    return OK;
}

CALL(Model_setOperandSymmPerChannelQuantParams, Model *m, int32_t index, const PerChannel *p)
{
    BEGIN("Model_setOperandSymmPerChannelQuantParams");
    if (!m || !p)
        return UNEXPECTED_NULL;
    if (index < 0 || index >= m->operands || m->operand[index].type != PER_CHANNEL)
        return BAD_DATA;
    if ((int)p->count != m->operand[index].dims[p->dim])
        return BAD_DATA;
    m->operand[index].channels = *p;
    return OK;
}

/* How many operands an operation takes; -1 for any number, 0 for an unknown operation. */
static bool right_count(int code, int n)
{
    switch (code) {
    case 0: case 18: case 30: case 36: return n == 3;
    case 1: case 17: return n == 7;
    case 2: return n >= 2;
    case 3: return n == 7 || n == 10;
    case 4: return n == 8 || n == 11;
    case 9: return n == 4;
    case 6: case 14: case 19: case 20: case 21: case 28: case 72: case 99: return n == 1;
    case 22: case 25: case 32: case 34: case 37: case 65: case 66: case 71: return n == 2;
    case 23: return n == 6;
    case 31: return n == 3;
    default: return false;
    }
}

CALL(Model_addOperation, Model *m, int32_t code, uint32_t ins, const uint32_t *in, uint32_t outs,
     const uint32_t *out)
{
    BEGIN("Model_addOperation");
    if (!m || !in || !out)
        return UNEXPECTED_NULL;
    if (m->finished)
        return BAD_STATE;
    if (!right_count(code, (int)ins) || outs != 1 || m->operations == MAX_OPERATIONS
        || ins > MAX_ENDS)
        return BAD_DATA;
    Operation *o = &m->operation[m->operations++];
    o->code = code, o->ins = (int)ins, o->outs = (int)outs;
    for (uint32_t i = 0; i < ins + outs; i++) {
        uint32_t index = i < ins ? in[i] : out[i - ins];
        if ((int)index >= m->operands)
            return BAD_DATA;
        *(i < ins ? &o->in[i] : &o->out[i - ins]) = (int)index;
    }
    return OK;
}

CALL(Model_identifyInputsAndOutputs, Model *m, uint32_t ins, const uint32_t *in, uint32_t outs,
     const uint32_t *out)
{
    BEGIN("Model_identifyInputsAndOutputs");
    if (ins > MAX_ENDS || outs > MAX_ENDS)
        return BAD_DATA;
    m->ins = (int)ins, m->outs = (int)outs;
    for (uint32_t i = 0; i < ins; i++)
        m->in[i] = (int)in[i];
    for (uint32_t i = 0; i < outs; i++)
        m->out[i] = (int)out[i];
    return OK;
}

CALL(Model_relaxComputationFloat32toFloat16, Model *m, bool allow)
{
    BEGIN("Model_relaxComputationFloat32toFloat16");
    m->relaxed = allow;
    return OK;
}

CALL(Model_finish, Model *m)
{
    BEGIN("Model_finish");
    if (m->finished)
        return BAD_STATE;
    m->finished = true;
    return OK;
}

CALL(Model_getSupportedOperationsForDevices, const Model *m, const Device *const *devices,
     uint32_t count, bool *supported)
{
    BEGIN("Model_getSupportedOperationsForDevices");
    if (!m->finished || count != 1)
        return BAD_STATE;
    for (int i = 0; i < m->operations; i++) {
        const char *lacks;
        supported[i] = true;
        for (int n = 0; devices[0] == &npu && (lacks = setting("lacks", n)); n++)
            supported[i] = supported[i] && atoi(lacks) != m->operation[i].code;
    }
    return OK;
}

CALL(Compilation_createForDevices, Model *m, const Device *const *devices, uint32_t count,
     Compilation **compilation)
{
    BEGIN("Compilation_createForDevices");
    if (!m->finished)
        return BAD_STATE;
    (void)devices;
    *compilation = calloc(1, sizeof **compilation);
    (*compilation)->model = m, (*compilation)->devices = (int)count;
    return OK;
}

EXPORT void ANeuralNetworksCompilation_free(Compilation *c);
EXPORT void ANeuralNetworksCompilation_free(Compilation *c) { free(c); }

CALL(Compilation_setPreference, Compilation *c, int32_t preference)
{
    BEGIN("Compilation_setPreference");
    return c->finished ? BAD_STATE : preference < 0 || preference > 2 ? BAD_DATA : OK;
}

/* Keeps a file of the token's first bytes there, as a driver keeps what it compiled. */
CALL(Compilation_setCaching, Compilation *c, const char *folder, const uint8_t *token)
{
    char path[4096];
    BEGIN("Compilation_setCaching");
    (void)c;
    snprintf(path, sizeof path, "%s/%02x%02x%02x%02x.nnapi", folder, token[0], token[1], token[2],
             token[3]);
    FILE *file = fopen(path, "a");
    if (!file)
        return BAD_DATA;
    fputs("compiled\n", file);
    fclose(file);
    return OK;
}

CALL(Compilation_finish, Compilation *c)
{
    BEGIN("Compilation_finish");
    if (c->finished)
        return BAD_STATE;
    c->finished = true;
    return OK;
}

CALL(Execution_create, Compilation *c, Execution **execution)
{
    BEGIN("Execution_create");
    if (!c->finished)
        return BAD_STATE;
    *execution = calloc(1, sizeof **execution);
    (*execution)->compilation = c;
    return OK;
}

EXPORT void ANeuralNetworksExecution_free(Execution *e);
EXPORT void ANeuralNetworksExecution_free(Execution *e) { free(e); }

static size_t elements(const Operand *o)
{
    size_t count = 1;
    for (int i = 0; i < o->rank; i++)
        count *= (size_t)o->dims[i];
    return count;
}

static size_t bytes_of(const Operand *o)
{
    bool wide = o->type == TENSOR_FLOAT32 || o->type == TENSOR_INT32;
    return elements(o) * (wide ? 4 : 1);
}

CALL(Execution_setInput, Execution *e, int32_t index, const void *type, const void *data,
     size_t length)
{
    BEGIN("Execution_setInput");
    const Model *m = e->compilation->model;
    if (!data || type)
        return UNEXPECTED_NULL;
    if (index < 0 || index >= m->ins || length != bytes_of(&m->operand[m->in[index]]))
        return BAD_DATA;
    e->in[index] = data;
    return OK;
}

CALL(Execution_setOutput, Execution *e, int32_t index, const void *type, void *data,
     size_t length)
{
    BEGIN("Execution_setOutput");
    const Model *m = e->compilation->model;
    if (!data || type)
        return UNEXPECTED_NULL;
    if (index < 0 || index >= m->outs)
        return BAD_DATA;
    if (length < bytes_of(&m->operand[m->out[index]]))
        return TOO_SMALL;
    e->out[index] = data;
    return OK;
}

CALL(Execution_setMeasureTiming, Execution *e, bool measure)
{
    BEGIN("Execution_setMeasureTiming");
    if (e->compilation->devices != 1)
        return BAD_DATA;
    e->timed = measure;
    return OK;
}

#include "stub_neuralnetworks_compute.h"

CALL(Execution_compute, Execution *e)
{
    struct timespec begin, end;
    BEGIN("Execution_compute");
    if (is_set("mode", "hang"))
        for (;;)
            pause();
    if (is_set("mode", "crash")) {
        fprintf(stderr, "test-npu: assertion failed in compute\n");
        abort();
    }
    clock_gettime(CLOCK_MONOTONIC, &begin);
    int result = compute(e->compilation->model, e->in, e->out, is_set("mode", "lie"));
    clock_gettime(CLOCK_MONOTONIC, &end);
    e->took_ns = (uint64_t)(end.tv_sec - begin.tv_sec) * 1000000000u
        + (uint64_t)(end.tv_nsec - begin.tv_nsec);
    e->done = true;
    return result;
}

CALL(Execution_getDuration, const Execution *e, int32_t code, uint64_t *duration)
{
    BEGIN("Execution_getDuration");
    (void)code;
    if (!e->done || !e->timed)
        return BAD_STATE;
    *duration = setting("untimed", 0) ? UINT64_MAX : e->took_ns;
    return OK;
}
