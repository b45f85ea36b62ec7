/* The arithmetic of stub_neuralnetworks.c: every tensor as floats, quantised ones rounded to
 * their steps after each operation. */

typedef struct { const Model *model; float **value; } Run;

static const Operand *operand(const Run *r, int i) { return &r->model->operand[i]; }

static int int_of(const Run *r, const Operation *o, int place)
{
    const Operand *p = operand(r, o->in[place]);
    return p->type == 6 ? *(const bool *)p->value : *(const int32_t *)p->value;
}

static float *widen(const Operand *o, const void *data)
{
    size_t count = elements(o);
    float *to = malloc(sizeof *to * count);
    size_t inner = 1;
    if (o->type == PER_CHANNEL)
        for (int i = (int)o->channels.dim + 1; i < o->rank; i++)
            inner *= (size_t)o->dims[i];
    for (size_t i = 0; i < count; i++)
        switch (o->type) {
        case TENSOR_FLOAT32: to[i] = ((const float *)data)[i]; break;
        case TENSOR_INT32: to[i] = (float)((const int32_t *)data)[i]; break;
        case QUANT8: to[i] = o->scale * (((const uint8_t *)data)[i] - o->zero_point); break;
        case QUANT8_SIGNED: to[i] = o->scale * (((const int8_t *)data)[i] - o->zero_point); break;
        default:
            to[i] = o->channels.scales[i / inner % o->channels.count]
                * (float)((const int8_t *)data)[i];
        }
    return to;
}

/* A bias of int32 has no scale of its own where the weights have one for each channel. */
static float bias_scale(const Run *r, const Operation *o, int channel)
{
    const Operand *x = operand(r, o->in[0]), *w = operand(r, o->in[1]);
    const Operand *b = operand(r, o->in[2]);
    if (b->type != TENSOR_INT32)
        return 1;
    return x->scale * (w->type == PER_CHANNEL ? w->channels.scales[channel] : w->scale);
}

static float stored(const Operand *o, float v)
{
    if (o->type != QUANT8 && o->type != QUANT8_SIGNED)
        return v;
    float low = o->type == QUANT8 ? 0 : -128, high = low + 255;
    float step = roundf(v / o->scale) + (float)o->zero_point;
    step = step < low ? low : step > high ? high : step;
    return o->scale * (step - (float)o->zero_point);
}

static void narrow(const Operand *o, const float *from, void *to)
{
    for (size_t i = 0; i < elements(o); i++)
        switch (o->type) {
        case TENSOR_FLOAT32: ((float *)to)[i] = from[i]; break;
        case TENSOR_INT32: ((int32_t *)to)[i] = (int32_t)from[i]; break;
        case QUANT8:
            ((uint8_t *)to)[i] = (uint8_t)(roundf(from[i] / o->scale) + (float)o->zero_point);
            break;
        default:
            ((int8_t *)to)[i] = (int8_t)(roundf(from[i] / o->scale) + (float)o->zero_point);
        }
}

static float fused(float v, int code)
{
    float low = code == 2 ? -1 : 0, high = code == 2 ? 1 : code == 3 ? 6 : INFINITY;
    return !code ? v : v < low ? low : v > high ? high : v;
}

/* Where the element `i` of `out` lies in an operand that is broadcast to it. */
static size_t spread(const Operand *out, const Operand *in, size_t i)
{
    size_t at = 0, step = 1;
    for (int axis = out->rank - 1, own = in->rank - 1; axis >= 0; axis--, own--) {
        size_t place = i % (size_t)out->dims[axis];
        i /= (size_t)out->dims[axis];
        if (own < 0)
            continue;
        at += in->dims[own] == 1 ? 0 : place * step;
        step *= (size_t)in->dims[own];
    }
    return at;
}

static void elementwise(const Run *r, const Operation *o)
{
    const Operand *out = operand(r, o->out[0]), *a = operand(r, o->in[0]);
    const Operand *b = o->ins > 1 ? operand(r, o->in[1]) : NULL;
    float *y = r->value[o->out[0]];
    const float *x = r->value[o->in[0]], *z = b ? r->value[o->in[1]] : NULL;
    int activation = o->ins == 3 ? int_of(r, o, 2) : 0;
    for (size_t i = 0; i < elements(out); i++) {
        float v = x[spread(out, a, i)], w = b ? z[spread(out, b, i)] : 0;
        switch (o->code) {
        case 0: v += w; break;
        case 18: v *= w; break;
        case 30: v /= w; break;
        case 36: v -= w; break;
        case 65: v = v > w ? v : w; break;
        case 66: v = v < w ? v : w; break;
        case 71: v = v < 0 ? v * w : v; break;
        case 14: v = 1 / (1 + expf(-v)); break;
        case 19: v = fused(v, 1); break;
        case 20: v = fused(v, 2); break;
        case 21: v = fused(v, 3); break;
        case 28: v = tanhf(v); break;
        case 99: v = v * fused(v + 3, 3) / 6; break;
        }
        y[i] = fused(v, activation);
    }
}

static int before(int scheme, int in, int out, int kernel, int stride)
{
    int total = (out - 1) * stride + kernel - in;
    return scheme == 1 && total > 0 ? total / 2 : 0;
}

static void convolve(const Run *r, const Operation *o)
{
    bool deep = o->code == 4;
    const Operand *xs = operand(r, o->in[0]), *ws = operand(r, o->in[1]);
    const Operand *ys = operand(r, o->out[0]);
    const float *x = r->value[o->in[0]], *w = r->value[o->in[1]], *b = r->value[o->in[2]];
    float *y = r->value[o->out[0]];
    int scheme = int_of(r, o, 3), sw = int_of(r, o, 4), sh = int_of(r, o, 5);
    int multiplier = deep ? int_of(r, o, 6) : 1, activation = int_of(r, o, deep ? 7 : 6);
    int extra = deep ? 9 : 8, dw = o->ins > extra ? int_of(r, o, extra) : 1;
    int dh = o->ins > extra ? int_of(r, o, extra + 1) : 1;
    int kh = ws->dims[1], kw = ws->dims[2], in = xs->dims[3], outs = ys->dims[3];
    int top = before(scheme, xs->dims[1], ys->dims[1], (kh - 1) * dh + 1, sh);
    int left = before(scheme, xs->dims[2], ys->dims[2], (kw - 1) * dw + 1, sw);
    for (int n = 0; n < ys->dims[0]; n++)
        for (int oy = 0; oy < ys->dims[1]; oy++)
            for (int ox = 0; ox < ys->dims[2]; ox++)
                for (int c = 0; c < outs; c++, y++) {
                    float sum = b[c] * bias_scale(r, o, c);
                    for (int ky = 0; ky < kh; ky++)
                        for (int kx = 0; kx < kw; kx++) {
                            int iy = oy * sh - top + ky * dh, ix = ox * sw - left + kx * dw;
                            if (iy < 0 || iy >= xs->dims[1] || ix < 0 || ix >= xs->dims[2])
                                continue;
                            const float *p = x + ((size_t)(n * xs->dims[1] + iy) * xs->dims[2]
                                                  + ix) * in;
                            if (deep)
                                sum += p[c / multiplier] * w[(ky * kw + kx) * outs + c];
                            else
                                for (int i = 0; i < in; i++)
                                    sum += p[i] * w[((size_t)(c * kh + ky) * kw + kx) * in + i];
                        }
                    *y = fused(sum, activation);
                }
}

static void pool(const Run *r, const Operation *o)
{
    const Operand *xs = operand(r, o->in[0]), *ys = operand(r, o->out[0]);
    const float *x = r->value[o->in[0]];
    float *y = r->value[o->out[0]];
    int scheme = int_of(r, o, 1), sw = int_of(r, o, 2), sh = int_of(r, o, 3);
    int kw = int_of(r, o, 4), kh = int_of(r, o, 5), activation = int_of(r, o, 6);
    int top = before(scheme, xs->dims[1], ys->dims[1], kh, sh);
    int left = before(scheme, xs->dims[2], ys->dims[2], kw, sw);
    for (int n = 0; n < ys->dims[0]; n++)
        for (int oy = 0; oy < ys->dims[1]; oy++)
            for (int ox = 0; ox < ys->dims[2]; ox++)
                for (int c = 0; c < ys->dims[3]; c++, y++) {
                    float sum = 0, most = -INFINITY;
                    int count = 0;
                    for (int ky = 0; ky < kh; ky++)
                        for (int kx = 0; kx < kw; kx++) {
                            int iy = oy * sh - top + ky, ix = ox * sw - left + kx;
                            if (iy < 0 || iy >= xs->dims[1] || ix < 0 || ix >= xs->dims[2])
                                continue;
                            float v = x[((size_t)(n * xs->dims[1] + iy) * xs->dims[2] + ix)
                                        * xs->dims[3] + c];
                            sum += v, count++;
                            most = v > most ? v : most;
                        }
                    *y = fused(o->code == 1 ? sum / (float)count : most, activation);
                }
}

static void fully_connected(const Run *r, const Operation *o)
{
    const Operand *ws = operand(r, o->in[1]), *ys = operand(r, o->out[0]);
    const float *x = r->value[o->in[0]], *w = r->value[o->in[1]], *b = r->value[o->in[2]];
    int outs = ws->dims[0], in = ws->dims[1], activation = int_of(r, o, 3);
    for (size_t i = 0; i < elements(ys); i++) {
        int c = (int)(i % (size_t)outs);
        float sum = b[c] * bias_scale(r, o, c);
        for (int k = 0; k < in; k++)
            sum += x[i / (size_t)outs * (size_t)in + (size_t)k] * w[(size_t)c * in + k];
        r->value[o->out[0]][i] = fused(sum, activation);
    }
}

static void softmax(const Run *r, const Operation *o)
{
    const Operand *xs = operand(r, o->in[0]);
    const float *x = r->value[o->in[0]];
    float *y = r->value[o->out[0]], beta = *(const float *)operand(r, o->in[1])->value;
    int last = xs->dims[xs->rank - 1];
    for (size_t row = 0; row < elements(xs) / (size_t)last; row++, x += last, y += last) {
        float most = x[0], sum = 0;
        for (int i = 1; i < last; i++)
            most = x[i] > most ? x[i] : most;
        for (int i = 0; i < last; i++)
            sum += y[i] = expf(beta * (x[i] - most));
        for (int i = 0; i < last; i++)
            y[i] /= sum;
    }
}

static void concatenate(const Run *r, const Operation *o)
{
    int axis = int_of(r, o, o->ins - 1);
    const Operand *ys = operand(r, o->out[0]);
    size_t inner = 1, outer = 1, at = 0;
    for (int i = 0; i < ys->rank; i++)
        *(i < axis ? &outer : &inner) *= (size_t)(i == axis ? 1 : ys->dims[i]);
    for (size_t block = 0; block < outer; block++)
        for (int k = 0; k < o->ins - 1; k++) {
            size_t run = inner * (size_t)operand(r, o->in[k])->dims[axis];
            memcpy(r->value[o->out[0]] + at, r->value[o->in[k]] + block * run,
                   run * sizeof(float));
            at += run;
        }
}

/* The place of each axis in an element's number. */
static void split(const Operand *o, size_t i, int *place)
{
    for (int axis = o->rank - 1; axis >= 0; axis--) {
        place[axis] = (int)(i % (size_t)o->dims[axis]);
        i /= (size_t)o->dims[axis];
    }
}

static size_t join(const Operand *o, const int *place)
{
    size_t at = 0;
    for (int axis = 0; axis < o->rank; axis++)
        at = at * (size_t)o->dims[axis] + (size_t)place[axis];
    return at;
}

static void move(const Run *r, const Operation *o)
{
    const Operand *xs = operand(r, o->in[0]), *ys = operand(r, o->out[0]);
    const int32_t *list = operand(r, o->in[1])->value;
    int from[MAX_RANK], to[MAX_RANK];
    if (o->code == 32)
        for (size_t i = 0; i < elements(ys); i++)
            r->value[o->out[0]][i] = 0;
    for (size_t i = 0; i < elements(o->code == 32 ? xs : ys); i++) {
        if (o->code == 32) {
            split(xs, i, from);
            for (int axis = 0; axis < xs->rank; axis++)
                to[axis] = from[axis] + list[2 * axis];
            r->value[o->out[0]][join(ys, to)] = r->value[o->in[0]][i];
        } else {
            split(ys, i, to);
            for (int axis = 0; axis < ys->rank; axis++)
                from[list[axis]] = to[axis];
            r->value[o->out[0]][i] = r->value[o->in[0]][join(xs, from)];
        }
    }
}

static void mean(const Run *r, const Operation *o)
{
    const Operand *xs = operand(r, o->in[0]), *axes = operand(r, o->in[1]);
    const Operand *ys = operand(r, o->out[0]);
    float *y = r->value[o->out[0]];
    Operand kept = *xs;
    int place[MAX_RANK];
    for (size_t i = 0; i < elements(axes); i++) {
        int axis = ((const int32_t *)axes->value)[i];
        kept.dims[axis < 0 ? axis + xs->rank : axis] = 1;
    }
    float share = (float)elements(ys) / (float)elements(xs);
    for (size_t i = 0; i < elements(ys); i++)
        y[i] = 0;
    for (size_t i = 0; i < elements(xs); i++) {
        split(xs, i, place);
        for (int axis = 0; axis < xs->rank; axis++)
            place[axis] = kept.dims[axis] == 1 ? 0 : place[axis];
        y[join(&kept, place)] += share * r->value[o->in[0]][i];
    }
}

static void resize(const Run *r, const Operation *o)
{
    const Operand *xs = operand(r, o->in[0]), *ys = operand(r, o->out[0]);
    int width = int_of(r, o, 1), height = int_of(r, o, 2);
    bool corners = int_of(r, o, 4), half = int_of(r, o, 5);
    int in[2] = {xs->dims[1], xs->dims[2]}, out[2] = {height, width}, place[MAX_RANK];
    for (size_t i = 0; i < elements(ys); i++) {
        int low[2], high[2];
        float share[2];
        split(ys, i, place);
        for (int k = 0; k < 2; k++) {
            float scale = corners && out[k] > 1 ? (float)(in[k] - 1) / (float)(out[k] - 1)
                                                : (float)in[k] / (float)out[k];
            float at = half ? ((float)place[k + 1] + 0.5f) * scale - 0.5f
                            : (float)place[k + 1] * scale;
            at = at < 0 ? 0 : at;
            low[k] = (int)at < in[k] - 1 ? (int)at : in[k] - 1;
            high[k] = low[k] + 1 < in[k] ? low[k] + 1 : in[k] - 1;
            share[k] = at - (float)low[k];
        }
        float sum = 0;
        for (int corner = 0; corner < 4; corner++) {
            int from[MAX_RANK] = {place[0], corner & 1 ? high[0] : low[0],
                                  corner & 2 ? high[1] : low[1], place[3]};
            sum += (corner & 1 ? share[0] : 1 - share[0]) * (corner & 2 ? share[1] : 1 - share[1])
                * r->value[o->in[0]][join(xs, from)];
        }
        r->value[o->out[0]][i] = sum;
    }
}

static void step(const Run *r, const Operation *o)
{
    switch (o->code) {
    case 1: case 17: pool(r, o); break;
    case 2: concatenate(r, o); break;
    case 3: case 4: convolve(r, o); break;
    case 9: fully_connected(r, o); break;
    case 23: resize(r, o); break;
    case 25: softmax(r, o); break;
    case 31: mean(r, o); break;
    case 32: case 37: move(r, o); break;
    case 22: case 34: case 6: case 72:
        memcpy(r->value[o->out[0]], r->value[o->in[0]],
               elements(operand(r, o->out[0])) * sizeof(float));
        break;
    default: elementwise(r, o);
    }
}

static int compute(const Model *m, const void *const *in, void *const *out, bool lie)
{
    Run r = {m, calloc((size_t)m->operands, sizeof(float *))};
    int result = OK;
    for (int i = 0; i < m->operands; i++)
        if (m->operand[i].value && m->operand[i].type >= TENSOR_FLOAT32 && m->operand[i].type != 6)
            r.value[i] = widen(&m->operand[i], m->operand[i].value);
    for (int i = 0; i < m->ins; i++) {
        if (!in[i])
            result = BAD_STATE;
        else
            r.value[m->in[i]] = widen(&m->operand[m->in[i]], in[i]);
    }
    for (int i = 0; i < m->operations && result == OK; i++) {
        const Operation *o = &m->operation[i];
        const Operand *to = &m->operand[o->out[0]];
        r.value[o->out[0]] = malloc(sizeof(float) * elements(to));
        step(&r, o);
        for (size_t k = 0; k < elements(to); k++)
            r.value[o->out[0]][k] = stored(to, r.value[o->out[0]][k] * (lie ? 0.9f : 1.0f));
    }
    for (int i = 0; i < m->outs && result == OK; i++) {
        if (!out[i] || !r.value[m->out[i]])
            result = OP_FAILED;
        else
            narrow(&m->operand[m->out[i]], r.value[m->out[i]], out[i]);
    }
    for (int i = 0; i < m->operands; i++)
        free(r.value[i]);
    free(r.value);
    return result;
}
