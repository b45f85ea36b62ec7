/* A small but real TFLite external delegate, for the tests: it computes FLOAT32 ADD, CONV_2D and
 * DEPTHWISE_CONV_2D itself, on the CPU, and can fail or be slow on demand. Weights may be stored
 * as half floats behind a DEQUANTIZE.
 *
 * Options (all strings):
 *   mode        ok | none (claims nothing) | add_only (claims ADD only) | lie (its numbers are
 *               a tenth too small) | hang (a run never ends) | abort_prepare (the process) |
 *               fail_create | fail_prepare | fail_allocate (of a partition) | fail_invoke
 *   fail_after  fail_invoke lets this many partition runs pass first
 *   latency_us  extra time per partition run
 *   latency_file  a file with the extra time per partition run, read anew each time
 *   create_us   time that it takes to be created, with every load of a model
 *   max_nodes   claims at most this many nodes
 *   int8        1: claims quantised convolutions too, and computes them in floats
 *   abort_after aborts the process in the partition run after this many
 *   busy_file   keeps its cumulative busy time there, in microseconds, as a driver's counter does
 *   busy_back   that counter runs backwards, as one that is reset again and again seems to
 *
 * The structs are declared by hand after the documented C API (tensorflow/lite/core/c/common.h,
 * builtin_op_data.h); only leading fields are used, and the sizes are asserted.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef enum { OK = 0, ERROR = 1, DELEGATE_ERROR = 2 } Status;
enum { FLOAT32 = 1, INT32 = 2, INT8 = 9, FLOAT16 = 10 };
enum { CONSTANT = 1, RELU = 1, RELU6 = 3, SAME = 1 };
enum { ADD = 0, CONV_2D = 3, DEPTHWISE_CONV_2D = 4, DEQUANTIZE = 6, CUSTOM = 32 };

typedef struct { int size; int data[]; } IntArray;
typedef struct { float scale; int32_t zero_point; } Scale;
typedef struct { int size; float data[]; } FloatArray;
typedef struct { FloatArray *scale; IntArray *zero_point; int32_t axis; } Affine;
typedef struct {
    int type;
    void *data;
    IntArray *dims;
    Scale scale;
    int allocation_type;
    size_t bytes;
    const void *allocation;
    const char *name;
    void *delegate;
    int buffer_handle;
    bool stale, variable;
    struct { int type; void *params; } quantization;
    void *sparsity;
    const IntArray *dims_signature;
} Tensor;
_Static_assert(sizeof(void *) != 8 || sizeof(Tensor) == 112, "TfLiteTensor of a 64-bit ABI");

typedef struct Context Context;
typedef struct Delegate Delegate;
typedef struct Node {
    IntArray *inputs, *outputs, *intermediates, *temporaries;
    void *user_data, *builtin_data;
    const void *custom_data;
    int custom_size;
    Delegate *delegate;
} Node;
typedef struct Registration {
    void *(*init)(Context *, const char *, size_t);
    void (*free)(Context *, void *);
    Status (*prepare)(Context *, Node *);
    Status (*invoke)(Context *, Node *);
    const char *(*profiling)(const Context *, const Node *);
    int32_t builtin_code;
    const char *custom_name;
    int version;
    void *external, *async;
    uint64_t inplace;
} Registration;
struct Context {
    size_t tensors_size;
    Status (*get_execution_plan)(Context *, IntArray **);
    Tensor *tensors;
    void *impl, *resize_tensor;
    void (*report_error)(Context *, const char *, ...);
    void *add_tensors;
    Status (*get_node)(Context *, int, Node **, Registration **);
    Status (*replace)(Context *, Registration, const IntArray *, Delegate *);
};
struct Delegate {
    void *data;
    Status (*prepare)(Context *, Delegate *);
    void *copy_from, *copy_to;
    void (*free_handle)(Context *, Delegate *, int *);
    int64_t flags;
    void *opaque;
};
typedef struct { Delegate *delegate; IntArray *nodes, *inputs, *outputs; } PartitionParams;
typedef struct { int padding, stride_w, stride_h, activation, dilation_w, dilation_h; } Conv;
typedef struct {
    int padding, stride_w, stride_h, multiplier, activation, dilation_w, dilation_h;
} Depthwise;

#ifdef TEST_LIES
#define DEFAULT_MODE MODE_LIE
#else
#define DEFAULT_MODE MODE_OK
#endif

enum mode {
    MODE_OK, MODE_NONE, MODE_ADD_ONLY, MODE_LIE, MODE_HANG, MODE_ABORT_PREPARE,
    MODE_FAIL_CREATE, MODE_FAIL_PREPARE, MODE_FAIL_ALLOCATE, MODE_FAIL_INVOKE, MODES
};
static const char *const mode_names[MODES] = {
    "ok", "none", "add_only", "lie", "hang", "abort_prepare",
    "fail_create", "fail_prepare", "fail_allocate", "fail_invoke",
};
typedef struct {
    enum mode mode;
    int fail_after, abort_after, latency_us, max_nodes, runs;
    uint64_t busy_us;
    int busy_back, int8;
    int *halves; /* of each tensor: the constant of half floats that it is the widened one of */
    char busy_file[512], latency_file[512];
} Options;

typedef struct {
    int code, a, b, out, activation;
    int padding, stride_w, stride_h;
    float *weights; /* [kh][kw][in][out], so that the inner loop runs over outputs */
    float *biases;
} Step;
typedef struct { int count; Step *steps; void **own; size_t own_count; Options *options; } Partition;

static uint64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

static float activate(float v, int activation)
{
    if ((activation == RELU || activation == RELU6) && v < 0)
        v = 0;
    return activation == RELU6 && v > 6 ? 6 : v;
}

static float half(uint16_t h)
{
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    float value = exponent ? (float)(1024 + mantissa) : (float)mantissa;
    for (int e = exponent ? exponent : 1; e < 25; e++)
        value /= 2;
    for (int e = 25; e < exponent; e++)
        value *= 2;
    return h & 0x8000 ? -value : value;
}

static size_t count_of(const Tensor *t)
{
    size_t count = 1;
    for (int i = 0; i < t->dims->size; i++)
        count *= (size_t)t->dims->data[i];
    return count;
}

/* A constant's real values; Each element by the scale of its channel where there are several. */
static float *widened(const Tensor *t)
{
    size_t count = count_of(t), inner = 1;
    const Affine *affine = t->quantization.params;
    float *to = malloc(sizeof *to * count);
    for (int i = affine ? affine->axis + 1 : 0; i < t->dims->size; i++)
        inner *= (size_t)t->dims->data[i];
    for (size_t i = 0; i < count; i++) {
        float scale = affine && affine->scale->size > 1
            ? affine->scale->data[i / inner % (size_t)affine->scale->size] : t->scale.scale;
        if (t->type == FLOAT32)
            to[i] = ((const float *)t->data)[i];
        else if (t->type == FLOAT16)
            to[i] = half(((const uint16_t *)t->data)[i]);
        else if (t->type == INT32)
            to[i] = scale * (float)((const int32_t *)t->data)[i];
        else
            to[i] = scale * (float)(((const int8_t *)t->data)[i] - t->scale.zero_point);
    }
    return to;
}

static void *data_of(Context *c, Partition *p, int tensor)
{
    return p->own[tensor] ? p->own[tensor] : c->tensors[tensor].data;
}

static void add(Context *c, Partition *p, const Step *s)
{
    const float *a = data_of(c, p, s->a), *b = data_of(c, p, s->b);
    float *out = data_of(c, p, s->out);
    for (size_t i = 0; i < c->tensors[s->out].bytes / sizeof *out; i++)
        out[i] = activate(a[i] + b[i], s->activation);
}

static void shrink(Context *c, Partition *p, int tensor)
{
    float *out = data_of(c, p, tensor);
    for (size_t i = 0; i < c->tensors[tensor].bytes / sizeof *out; i++)
        out[i] *= 0.9f;
}

static int pad_before(int padding, int in, int out, int kernel, int stride)
{
    int total = (out - 1) * stride + kernel - in;
    return padding == SAME && total > 0 ? total / 2 : 0;
}

static void convolve(Context *c, Partition *p, const Step *s)
{
    const Tensor *from = &c->tensors[s->a], *to = &c->tensors[s->out];
    const int *in = from->dims->data, *k = c->tensors[s->b].dims->data;
    const int *shape = to->dims->data;
    int8_t *stored = data_of(c, p, s->out);
    float *x = data_of(c, p, s->a), *y = (float *)stored, *wide_in = NULL, *wide_out = NULL;
    if (from->type == INT8) {
        Tensor quantised = *from;
        quantised.data = x;
        x = wide_in = widened(&quantised);
        y = wide_out = malloc(sizeof *y * count_of(to));
    }
    int channels = in[3], outputs = shape[3], depthwise = s->code == DEPTHWISE_CONV_2D;
    int top = pad_before(s->padding, in[1], shape[1], k[1], s->stride_h);
    int left = pad_before(s->padding, in[2], shape[2], k[2], s->stride_w);
    for (int oy = 0; oy < shape[1]; oy++)
        for (int ox = 0; ox < shape[2]; ox++, y += outputs) {
            memcpy(y, s->biases, sizeof *y * (size_t)outputs);
            for (int ky = 0; ky < k[1]; ky++)
                for (int kx = 0; kx < k[2]; kx++) {
                    int iy = oy * s->stride_h - top + ky, ix = ox * s->stride_w - left + kx;
                    if (iy < 0 || iy >= in[1] || ix < 0 || ix >= in[2])
                        continue;
                    const float *pixel = x + ((size_t)iy * in[2] + ix) * channels;
                    const float *w = s->weights + (size_t)(ky * k[2] + kx) * outputs
                        * (depthwise ? 1 : channels);
                    if (depthwise)
                        for (int o = 0; o < outputs; o++)
                            y[o] += pixel[o] * w[o];
                    else
                        for (int i = 0; i < channels; i++, w += outputs)
                            for (int o = 0; o < outputs; o++)
                                y[o] += pixel[i] * w[o];
                }
            for (int o = 0; o < outputs; o++)
                y[o] = activate(y[o], s->activation);
        }
    for (size_t i = 0; wide_out && i < count_of(to); i++) {
        float step = wide_out[i] / to->scale.scale + (float)to->scale.zero_point;
        step = step < -128 ? -128 : step > 127 ? 127 : step;
        stored[i] = (int8_t)(step + (step < 0 ? -0.5f : 0.5f));
    }
    free(wide_in), free(wide_out);
}

/* The constant behind a weight or bias, NULL where it is computed. */
static const Tensor *constant(Context *c, const Options *o, int tensor)
{
    if (c->tensors[tensor].allocation_type == CONSTANT)
        return &c->tensors[tensor];
    return o->halves[tensor] >= 0 ? &c->tensors[o->halves[tensor]] : NULL;
}

/* [out][kh][kw][in] to [kh][kw][in][out]; a depthwise filter is [1][kh][kw][out] already. */
static float *transposed(const Tensor *filter, int code)
{
    const int *k = filter->dims->data;
    float *from = widened(filter);
    if (code == DEPTHWISE_CONV_2D)
        return from;
    float *to = malloc(sizeof *to * count_of(filter));
    int taps = k[1] * k[2] * k[3];
    for (int o = 0; o < k[0]; o++)
        for (int i = 0; i < taps; i++)
            to[(size_t)i * k[0] + o] = from[(size_t)o * taps + i];
    free(from);
    return to;
}

static void *partition_init(Context *c, const char *buffer, size_t length)
{
    const PartitionParams *params = (const PartitionParams *)buffer;
    (void)length;
    Partition *p = calloc(1, sizeof *p);
    p->count = params->nodes->size;
    p->steps = calloc((size_t)p->count, sizeof *p->steps);
    p->own_count = c->tensors_size;
    p->own = calloc(p->own_count, sizeof *p->own);
    p->options = params->delegate->data;
    for (int i = 0; i < p->count; i++) {
        Node *node;
        Registration *registration;
        c->get_node(c, params->nodes->data[i], &node, &registration);
        Step *s = &p->steps[i];
        s->code = registration->builtin_code;
        s->a = node->inputs->data[0];
        s->b = node->inputs->size > 1 ? node->inputs->data[1] : -1;
        s->out = node->outputs->data[0];
        if (s->code == DEQUANTIZE) {
            s->weights = widened(&c->tensors[s->a]);
        } else if (s->code == ADD) {
            s->activation = *(int *)node->builtin_data;
        } else if (s->code == CONV_2D) {
            const Conv *conv = node->builtin_data;
            s->padding = conv->padding, s->activation = conv->activation;
            s->stride_w = conv->stride_w, s->stride_h = conv->stride_h;
        } else {
            const Depthwise *conv = node->builtin_data;
            s->padding = conv->padding, s->activation = conv->activation;
            s->stride_w = conv->stride_w, s->stride_h = conv->stride_h;
        }
        if (s->code == CONV_2D || s->code == DEPTHWISE_CONV_2D) {
            s->biases = widened(constant(c, p->options, node->inputs->data[2]));
            s->weights = transposed(constant(c, p->options, s->b), s->code);
        }
        /* Tensors inside a partition get no memory from the interpreter. */
        bool outside = false;
        for (int o = 0; o < params->outputs->size; o++)
            outside = outside || params->outputs->data[o] == s->out;
        if (!outside)
            p->own[s->out] = malloc(c->tensors[s->out].bytes);
    }
    return p;
}

static void partition_free(Context *c, void *data)
{
    Partition *p = data;
    (void)c;
    for (int i = 0; i < p->count; i++)
        free(p->steps[i].weights), free(p->steps[i].biases);
    for (size_t i = 0; i < p->own_count; i++)
        free(p->own[i]);
    free(p->steps), free(p->own), free(p);
}

static Status partition_prepare(Context *c, Node *node)
{
    Partition *p = node->user_data;
    if (p->options->mode != MODE_FAIL_ALLOCATE)
        return OK;
    c->report_error(c, "test delegate: no memory on the device");
    return DELEGATE_ERROR;
}

static void keep_counter(Options *o)
{
    if (!o->busy_file[0])
        return;
    char next[sizeof o->busy_file + 8];
    snprintf(next, sizeof next, "%s.next", o->busy_file);
    FILE *file = fopen(next, "w");
    if (!file)
        return;
    uint64_t shown = o->busy_back ? 1000000000000u - o->busy_us : o->busy_us;
    fprintf(file, "%llu\n", (unsigned long long)shown);
    fclose(file);
    rename(next, o->busy_file);
}

static Status partition_invoke(Context *c, Node *node)
{
    Partition *p = node->user_data;
    Options *o = p->options;
    uint64_t begin = now_us();
    o->runs++;
    if (o->abort_after >= 0 && o->runs > o->abort_after) {
        fprintf(stderr, "test delegate: assertion failed in run %d\n", o->runs);
        abort();
    }
    if (o->mode == MODE_FAIL_INVOKE && o->runs > o->fail_after) {
        c->report_error(c, "test delegate: device lost in run %d", o->runs);
        return DELEGATE_ERROR;
    }
    while (o->mode == MODE_HANG)
        pause();
    if (o->latency_file[0]) {
        FILE *file = fopen(o->latency_file, "r");
        if (file) {
            if (fscanf(file, "%d", &o->latency_us) != 1)
                o->latency_us = 0;
            fclose(file);
        }
    }
    if (o->latency_us)
        usleep((useconds_t)o->latency_us);
    for (int i = 0; i < p->count; i++) {
        const Step *s = &p->steps[i];
        if (s->code == DEQUANTIZE)
            memcpy(data_of(c, p, s->out), s->weights, c->tensors[s->out].bytes);
        else
            (s->code == ADD ? add : convolve)(c, p, s);
        if (o->mode == MODE_LIE && c->tensors[s->out].type == FLOAT32)
            shrink(c, p, p->steps[i].out);
    }
    o->busy_us += now_us() - begin;
    keep_counter(o);
    return OK;
}

static bool same_shape(const Tensor *a, const Tensor *b)
{
    return a->dims->size == b->dims->size
        && !memcmp(a->dims->data, b->dims->data, sizeof(int) * (size_t)a->dims->size);
}

static bool can_run(Context *c, const Options *o, const Node *node, const Registration *reg)
{
    if (reg->custom_name || node->outputs->size != 1)
        return false;
    const Tensor *a = &c->tensors[node->inputs->data[0]];
    const Tensor *out = &c->tensors[node->outputs->data[0]];
    int activation, code = reg->builtin_code;
    if (code == DEQUANTIZE)
        return o->halves[node->outputs->data[0]] >= 0;
    if (node->inputs->size < 2 || !node->builtin_data)
        return false;
    const Tensor *b = &c->tensors[node->inputs->data[1]];
    bool floats = a->type == FLOAT32 && b->type == FLOAT32 && out->type == FLOAT32;
    bool bytes = a->type == INT8 && b->type == INT8 && out->type == INT8 && o->int8;
    if (code == ADD) {
        activation = *(int *)node->builtin_data;
        if (!floats || !same_shape(a, b))
            return false;
    } else if (code == CONV_2D || code == DEPTHWISE_CONV_2D) {
        if (!floats && !bytes)
            return false;
        if (node->inputs->size != 3 || a->dims->size != 4 || a->dims->data[0] != 1)
            return false;
        if (!constant(c, o, node->inputs->data[1]) || !constant(c, o, node->inputs->data[2]))
            return false;
        const Conv *conv = node->builtin_data;
        const Depthwise *deep = node->builtin_data;
        bool plain = code == CONV_2D
            ? conv->dilation_w == 1 && conv->dilation_h == 1
                && b->dims->data[3] == a->dims->data[3]
            : deep->dilation_w == 1 && deep->dilation_h == 1
                && b->dims->data[3] == a->dims->data[3];
        if (!plain)
            return false;
        activation = code == CONV_2D ? conv->activation : deep->activation;
    } else {
        return false;
    }
    return activation == 0 || activation == RELU || activation == RELU6;
}

/* Which tensors are constants of half floats, widened. */
static void find_halves(Context *c, Options *o, const IntArray *plan)
{
    free(o->halves);
    o->halves = malloc(sizeof *o->halves * c->tensors_size);
    for (size_t i = 0; i < c->tensors_size; i++)
        o->halves[i] = -1;
    for (int i = 0; i < plan->size; i++) {
        Node *node;
        Registration *registration;
        if (c->get_node(c, plan->data[i], &node, &registration) != OK
            || registration->builtin_code != DEQUANTIZE)
            continue;
        const Tensor *from = &c->tensors[node->inputs->data[0]];
        if (from->type == FLOAT16 && from->allocation_type == CONSTANT)
            o->halves[node->outputs->data[0]] = node->inputs->data[0];
    }
}

static Status prepare(Context *c, Delegate *delegate)
{
    Options *o = delegate->data;
    if (o->mode == MODE_FAIL_PREPARE) {
        c->report_error(c, "test delegate: firmware not loaded");
        return DELEGATE_ERROR;
    }
    if (o->mode == MODE_ABORT_PREPARE) {
        fprintf(stderr, "test delegate: assertion failed in the compiler\n");
        abort();
    }
    if (o->mode == MODE_NONE)
        return OK;
    IntArray *plan;
    if (c->get_execution_plan(c, &plan) != OK)
        return ERROR;
    find_halves(c, o, plan);
    IntArray *chosen = malloc(sizeof *chosen + sizeof(int) * (size_t)plan->size);
    chosen->size = 0;
    for (int i = 0; i < plan->size; i++) {
        Node *node;
        Registration *registration;
        if (o->max_nodes >= 0 && chosen->size >= o->max_nodes)
            break;
        if (c->get_node(c, plan->data[i], &node, &registration) == OK
            && (o->mode != MODE_ADD_ONLY || registration->builtin_code == ADD)
            && can_run(c, o, node, registration))
            chosen->data[chosen->size++] = plan->data[i];
    }
    Registration kernel = {
        .init = partition_init, .free = partition_free, .prepare = partition_prepare,
        .invoke = partition_invoke, .builtin_code = CUSTOM, .custom_name = "TestNpu",
        .version = 1,
    };
    Status status = chosen->size ? c->replace(c, kernel, chosen, delegate) : OK;
    free(chosen);
    return status;
}

static bool named_mode(const char *name, enum mode *mode)
{
    for (int i = 0; i < MODES; i++)
        if (!strcmp(name, mode_names[i])) {
            *mode = (enum mode)i;
            return true;
        }
    return false;
}

#define EXPORT __attribute__((visibility("default")))

EXPORT void tflite_plugin_destroy_delegate(Delegate *delegate)
{
    if (delegate) {
        free(((Options *)delegate->data)->halves);
        free(delegate->data);
    }
    free(delegate);
}

EXPORT Delegate *tflite_plugin_create_delegate(
    char **keys, char **values, size_t count, void (*report)(const char *))
{
    Options *o = calloc(1, sizeof *o);
    const char *wrong = NULL;
    o->max_nodes = o->abort_after = -1;
    o->mode = DEFAULT_MODE;
    for (size_t i = 0; i < count; i++) {
        const char *key = keys[i], *value = values[i];
        if (!strcmp(key, "fail_after"))
            o->fail_after = atoi(value);
        else if (!strcmp(key, "abort_after"))
            o->abort_after = atoi(value);
        else if (!strcmp(key, "latency_us"))
            o->latency_us = atoi(value);
        else if (!strcmp(key, "create_us"))
            usleep((useconds_t)atoi(value));
        else if (!strcmp(key, "max_nodes"))
            o->max_nodes = atoi(value);
        else if (!strcmp(key, "int8"))
            o->int8 = atoi(value);
        else if (!strcmp(key, "busy_back"))
            o->busy_back = atoi(value);
        else if (!strcmp(key, "latency_file"))
            snprintf(o->latency_file, sizeof o->latency_file, "%s", value);
        else if (!strcmp(key, "busy_file"))
            snprintf(o->busy_file, sizeof o->busy_file, "%s", value);
        else if (strcmp(key, "mode"))
            wrong = "test delegate: unknown option";
        else if (!named_mode(value, &o->mode))
            wrong = "test delegate: unknown mode";
    }
    if (o->mode == MODE_FAIL_CREATE)
        wrong = "test delegate: cannot open /dev/testnpu0: No such device";
    if (wrong) {
        if (report)
            report(wrong);
        free(o);
        return NULL;
    }
    keep_counter(o);
    Delegate *delegate = calloc(1, sizeof *delegate);
    delegate->data = o;
    delegate->prepare = prepare;
    return delegate;
}
