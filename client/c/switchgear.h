/*
 * Switchgear's client for C and for whatever can call C: one header, one source file, libc only
 * (C11 on Linux or Android).  Compile switchgear.c into your program:
 *
 *     cc -std=c11 -O2 -o example example.c switchgear.c
 *
 * A client is a control connection: it loads models and opens sessions.  A session owns a socket
 * and an arena of shared memory; it outlives its client.  Write the inputs of a slot where they
 * lie, run the slot, read the outputs where they lie: no copy, one small record each way.
 *
 * Functions that can fail return 0, or -1 and say why in `error` (which may be NULL).  A client or
 * a session belongs to one thread at a time; different ones do not know of each other.  Nothing
 * here reconnects: after SG_CONNECTION_LOST, close the session and open another.
 * Descriptors are close-on-exec.  Times are in milliseconds; a negative one waits for ever.
 */
#ifndef SWITCHGEAR_H
#define SWITCHGEAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SG_MAX_RANK 8
#define SG_MAX_TENSORS 64
#define SG_MAX_SLOTS 16

/* Codes of errors that a program may want to tell apart; docs/protocol.md has all of them. */
enum {
    SG_BAD_REQUEST = 100,
    SG_BAD_SLOT = 102,
    SG_SLOT_BUSY = 103,
    SG_UNKNOWN_MODEL = 106,
    SG_BAD_MODEL = 107,
    SG_NOT_PREPARED = 114,
    SG_PERMISSION_DENIED = 115,
    SG_CANCELLED = 200,
    SG_SUPERSEDED = 201,
    SG_DEADLINE_EXCEEDED = 202,
    SG_BUSY = 300,
    SG_STATE_LOST = 402,
    SG_BACKEND_FAILED = 404,
    SG_SHUTTING_DOWN = 405,
    SG_TIMED_OUT = 407,
    SG_CONNECTION_LOST = 500,
    SG_PROTOCOL_ERROR = 501,
    SG_NOT_RUNNING = 502,
    SG_INTERNAL_ERROR = 599
};

typedef struct sg_error {
    int code;                 /* of the table in docs/protocol.md; 0 is none */
    char name[32];            /* its name there, such as "Busy" */
    char text[256];           /* a sentence, UTF-8, possibly cut */
    int64_t retry_after_ms;   /* 0: not said */
    char domain[16];          /* with SG_BACKEND_FAILED: where driver_code comes from */
    int driver_code;
} sg_error;

typedef enum sg_dtype {
    SG_FLOAT32 = 1, SG_FLOAT16, SG_FLOAT64, SG_INT8, SG_UINT8, SG_INT16, SG_UINT16,
    SG_INT32, SG_UINT32, SG_INT64, SG_UINT64, SG_BOOL, SG_COMPLEX64
} sg_dtype;

/* What a session's model takes or gives.  Elements are little-endian, in C order. */
typedef struct sg_tensor {
    const char *name;         /* of the session */
    sg_dtype dtype;
    int rank;
    uint32_t shape[SG_MAX_RANK];
    size_t capacity_bytes;    /* the room that it has in a slot */
    bool dynamic;             /* an output whose shape is known only after a run */
} sg_tensor;

/* An output of one run. */
typedef struct sg_output {
    const void *data;         /* in the arena */
    size_t bytes;
    sg_dtype dtype;
    int rank;
    uint32_t shape[SG_MAX_RANK];
} sg_output;

/* How a run ended.  Valid, as is what it points to, until the next sg_submit() or sg_run() in the
 * same slot, or until the session is closed. */
typedef struct sg_result {
    int slot;
    uint64_t request_id;
    const sg_output *outputs; /* in the order of sg_output_spec() */
    size_t output_count;
    const char *backend;      /* "cpu", "vulkan", "opencl", "npu", "other" */
    const char *precision;    /* "fp32", "fp16", "int8", "int4", or "none" */
    int reason;               /* why this backend: the table in docs/protocol.md */
    int retries;              /* after the death of a worker */
    uint32_t tried;           /* bit n: backend number n failed before */
    bool late;                /* it ended after its deadline */
    int64_t temperature_age_ms; /* -1: no reading */
    uint64_t queue_ns, run_ns, total_ns;
} sg_result;

typedef struct sg_shape {
    const char *input;
    int rank;
    uint32_t shape[SG_MAX_RANK];
} sg_shape;

/* How a place where the session may run stands now (docs/protocol.md). */
typedef struct sg_event {
    const char *kind;         /* "normal", "shedding", "tripped", "degraded", "recovering" when its
                               * state is another; "headroom" when only that crossed a step */
    const char *backend;      /* as in sg_result */
    const char *precision;
    const char *state;        /* of the place; words as in kind */
    const char *device_state;
    double share;             /* the part of the frames that it may be given, 0 to 1 */
    bool has_temperature;     /* of the two below */
    int32_t headroom_mc;      /* millidegrees C below the device's trip; negative above it */
    int64_t temperature_age_ms;
    int64_t retry_after_ms;   /* how long a shut place stays so at least; 0: not said */
    uint64_t number;          /* counts changes; a gap is changes that this one replaced */
    uint32_t epoch;
    uint64_t at_ns;           /* CLOCK_MONOTONIC */
} sg_event;

/* Called from within functions that receive (sg_wait, sg_wait_any, sg_run, sg_take_events, and a
 * sg_submit or sg_cancel that finds the daemon gone).  It must not call functions of this
 * session; what it is given is valid until it returns. */
typedef void (*sg_on_event)(void *context, const sg_event *event);

/* All zero is a good choice but for `model`. */
typedef struct sg_session_options {
    const char *model;        /* a name, a hash, or the first 8 or more digits of one */
    int slots;                /* requests in flight at most; 0: two */
    const char *on_busy;      /* "wait" (NULL), "reject", "replace_oldest" */
    const char *priority;     /* "normal" (NULL), "high", "batch" */
    const char *const *backends; /* the allowed ones, in order; NULL: all */
    size_t backend_count;
    bool strict;              /* an error rather than another backend */
    const sg_shape *shapes;   /* for inputs with free dimensions */
    size_t shape_count;
    int64_t output_capacity_bytes; /* room for outputs of unknown size; 0: the daemon's choice */
    sg_on_event on_event;     /* hears of the places where the session may run; NULL: no events */
    void *event_context;      /* handed to it */
    bool hedge;               /* may run a request in a second place too */
} sg_session_options;

/* All zero is a good choice; so is NULL. */
typedef struct sg_request {
    int64_t timeout_us;       /* after it, the answer is DeadlineExceeded; 0: none */
    int priority;             /* 0 the session's, 1 high, 2 normal, 3 batch */
    bool reset;               /* a stateful model starts from a fresh state */
    int capture_clock;        /* 0 none, 1 monotonic, 2 boottime, 3 realtime */
    uint64_t capture_ns;
    uint8_t trace_id[16];
} sg_request;

typedef struct sg_client sg_client;
typedef struct sg_session sg_session;

/* --- control plane: each call waits for its answer, at most timeout_ms --- */

/* `path` NULL: $SWITCHGEAR_SOCKET, else this user's own daemon, else the system's. */
sg_client *sg_connect(const char *path, int timeout_ms, sg_error *error);
void sg_disconnect(sg_client *client); /* NULL is fine; sessions go on */

/* Hands over a .tflite model and waits until it serves.  The descriptor stays the caller's and may
 * be closed afterwards.  `name` may be NULL.  `hash` gets 64 digits and a NUL; it may be NULL. */
int sg_load_model_fd(sg_client *client, int fd, const char *name, int timeout_ms, char hash[65],
                     sg_error *error);
int sg_load_model(sg_client *client, const char *file, const char *name, int timeout_ms,
                  char hash[65], sg_error *error);

/* Has the daemon try the model with input shapes that are new to it (SG_NOT_PREPARED). */
int sg_prepare_shapes(sg_client *client, const char *model, const sg_shape *shapes,
                      size_t shape_count, int timeout_ms, sg_error *error);
int sg_unload_model(sg_client *client, const char *model, bool force, int timeout_ms,
                    sg_error *error);

/* Any other method: `parameters` is a JSON object or NULL.  *reply gets that of the answer, to be
 * freed with free(). */
int sg_call(sg_client *client, const char *method, const char *parameters, int timeout_ms,
            char **reply, sg_error *error);

sg_session *sg_open_session(sg_client *client, const sg_session_options *options, int timeout_ms,
                            sg_error *error);

/* --- data plane --- */

void sg_close_session(sg_session *session); /* NULL is fine; requests in flight are cancelled */

int sg_slot_count(const sg_session *session);
size_t sg_input_count(const sg_session *session);
size_t sg_output_count(const sg_session *session);
const sg_tensor *sg_input_spec(const sg_session *session, size_t input);   /* NULL: none */
const sg_tensor *sg_output_spec(const sg_session *session, size_t output); /* NULL: none */
bool sg_is_stateful(const sg_session *session);
uint32_t sg_epoch(const sg_session *session); /* changes with SG_STATE_LOST */

/* Where an input lies: capacity_bytes of its tensor.  Write to it only while the slot has no
 * request in flight.  NULL: there is none. */
void *sg_input(sg_session *session, int slot, size_t input);

/* Sends a slot's request; does not wait. */
int sg_submit(sg_session *session, int slot, const sg_request *request, sg_error *error);

/* Waits for a slot's request.  SG_TIMED_OUT: it is still in flight; wait again, or cancel it. */
int sg_wait(sg_session *session, int slot, int timeout_ms, sg_result *result, sg_error *error);

/* Waits for any request in flight.  *slot is the one that ended, also where it failed; -1 where
 * none has ended. */
int sg_wait_any(sg_session *session, int timeout_ms, int *slot, sg_result *result,
                sg_error *error);

/* Both in one, without a time limit of its own: give the request a timeout_us. */
int sg_run(sg_session *session, int slot, const sg_request *request, sg_result *result,
           sg_error *error);

/* Asks for an end; sg_wait() then tells SG_CANCELLED, or the result that came first. */
int sg_cancel(sg_session *session, int slot, sg_error *error);

/* Hands what has come to on_event, and waits for more, at most timeout_ms, where nothing had.
 * Returns the number of events, 0 when the time is over; -1 when the session is.  Answers that
 * come meanwhile are kept for sg_wait(). */
int sg_take_events(sg_session *session, int timeout_ms, sg_error *error);

/* For poll(): readable when sg_wait_any(session, 0, ...) has something to do. */
int sg_session_fd(const sg_session *session);

const char *sg_dtype_name(sg_dtype dtype);  /* "" for none */
size_t sg_dtype_bytes(sg_dtype dtype);      /* of one element; 0 for none */

#ifdef __cplusplus
}
#endif
#endif
