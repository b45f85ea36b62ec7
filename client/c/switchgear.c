/* Switchgear's client for C: see switchgear.h for how it is used, docs/protocol.md for the wire.
 *
 * The peer is not trusted: every length, index, offset and descriptor that it names is held
 * against what is really there, and what lies in shared memory is copied before it is checked. */
#define _GNU_SOURCE
#include "switchgear.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define INTERFACE "io.switchgear."
#define SYSTEM_SOCKET "/run/switchgear/switchgear.sock"

/* Bounds of the control plane (docs/protocol.md). */
#define MAX_MESSAGE_BYTES (2u << 20)
#define MAX_DESCRIPTORS 16
#define MAX_NESTING 32
#define MAX_NODES 65536
#define READ_BYTES 65536

/* The record. */
#define RECORD_BYTES 128
#define RECORD_VERSION 1
#define NO_SLOT 65535
#define NO_READING 4294967295u
#define NO_HEADROOM INT32_MIN
#define WHOLE_SHARE 1000
#define MAX_OUTPUT_SLOTS 256
/* Records taken in one go: a peer that sends without end is not waited for. */
#define MAX_TAKEN 256
enum { INFER = 1, REPLY = 2, CANCEL = 3, EVENT = 4, GOAWAY = 6 };
enum { RESET = 1, LATE = 2 };
enum { DOMAIN_OK = 0, DOMAIN_SWITCHGEAR = 1 };

/* The arena. */
#define SLOT_MAGIC 0x544F4C53u
#define ERROR_MAGIC 0x54525245u
#define HEADER_BYTES 32
#define ENTRY_BYTES 64
#define TENSOR_ALIGN_BYTES 256

/* --- errors ------------------------------------------------------------------------------- */

static const struct {
    int code;
    const char *name;
} error_names[] = {
    {100, "BadRequest"}, {101, "BadRecord"}, {102, "BadSlot"}, {103, "SlotBusy"},
    {104, "BadInput"}, {105, "BadShape"}, {106, "UnknownModel"}, {107, "BadModel"},
    {108, "UnsupportedModel"}, {109, "ModelInUse"}, {110, "BadDescriptor"},
    {111, "ModelTooLarge"}, {112, "UnknownJob"}, {113, "UnknownBackend"},
    {114, "NotPrepared"}, {115, "PermissionDenied"}, {116, "BadConfiguration"},
    {200, "Cancelled"}, {201, "Superseded"}, {202, "DeadlineExceeded"}, {300, "Busy"},
    {301, "Overloaded"}, {302, "NoSpace"}, {303, "QuotaExceeded"}, {400, "NoBackend"},
    {401, "WorkerDied"}, {402, "StateLost"}, {403, "OutputTooLarge"}, {404, "BackendFailed"},
    {405, "ShuttingDown"}, {406, "ModelQuarantined"}, {407, "TimedOut"},
    {500, "ConnectionLost"}, {501, "ProtocolError"}, {502, "NotRunning"},
    {503, "AlreadyRunning"}, {599, "InternalError"},
};

static const char *const domain_names[] = {"ok", "switchgear", "errno", "signal", "tflite",
    "vulkan", "opencl", "nnapi", "delegate", "litert"};
static const char *const backend_names[] = {"", "cpu", "vulkan", "opencl", "npu", "other"};
static const char *const precision_names[] = {"none", "fp32", "fp16", "int8", "int4"};
static const char *const event_names[] = {"none", "normal", "shedding", "tripped", "degraded",
    "recovering", "headroom"};

#define COUNT(array) (sizeof(array) / sizeof(array)[0])
#define NAME_OF(array, index) ((size_t)(index) < COUNT(array) ? array[index] : "unknown")

static const char *name_of_error(int code)
{
    for (size_t i = 0; i < COUNT(error_names); i++)
        if (error_names[i].code == code)
            return error_names[i].name;

    return "InternalError";
}

static int code_of_error(const char *name)
{
    for (size_t i = 0; i < COUNT(error_names); i++)
        if (strcmp(error_names[i].name, name) == 0)
            return error_names[i].code;

    return SG_INTERNAL_ERROR;
}

static void put_string(char *target, size_t room, const char *text)
{
    size_t length = strlen(text);

    if (length >= room) {
        length = room - 1;
        /* Not in the middle of a character. */
        while (length > 0 && ((unsigned char)text[length] & 0xC0) == 0x80)
            length--;
    }

    memcpy(target, text, length);
    target[length] = '\0';
}

/* Fills in `error` and returns -1, so that a caller can return it in turn. */
__attribute__((format(printf, 3, 4)))
static int fail(sg_error *error, int code, const char *format, ...)
{
    char text[sizeof error->text];
    va_list arguments;

    if (error == NULL)
        return -1;

    /* The arguments may lie in *error itself. */
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    memset(error, 0, sizeof *error);
    error->code = code;
    put_string(error->name, sizeof error->name, name_of_error(code));
    put_string(error->text, sizeof error->text, text);
    return -1;
}

static int no_memory(sg_error *error)
{
    return fail(error, SG_INTERNAL_ERROR, "no memory left in this process");
}

/* --- time --------------------------------------------------------------------------------- */

static int64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* -1: never. */
static int64_t deadline_of(int timeout_ms)
{
    return timeout_ms < 0 ? -1 : now_ms() + timeout_ms;
}

/* Waits for `events`: 1 they are there, 0 the time is over, -1 with errno. */
static int wait_for(int fd, short events, int64_t deadline)
{
    for (;;) {
        struct pollfd item = {.fd = fd, .events = events};
        int64_t left = deadline < 0 ? -1 : deadline - now_ms();
        int count;

        if (deadline >= 0 && left < 0)
            left = 0;

        count = poll(&item, 1, left > INT_MAX ? INT_MAX : (int)left);
        if (count >= 0 || errno != EINTR)
            return count > 0 ? 1 : count;
    }
}

/* --- JSON, written ------------------------------------------------------------------------ */

typedef struct {
    char *data;
    size_t length, room;
    bool failed;
} writer;

static void add(writer *out, const char *data, size_t length)
{
    if (out->failed)
        return;

    if (out->length + length > MAX_MESSAGE_BYTES) {
        out->failed = true;
        return;
    }

    if (out->length + length > out->room) {
        size_t room = 2 * (out->length + length) + 256;
        char *grown = realloc(out->data, room);

        if (grown == NULL) {
            out->failed = true;
            return;
        }

        out->data = grown;
        out->room = room;
    }

    memcpy(out->data + out->length, data, length);
    out->length += length;
}

static void add_text(writer *out, const char *text)
{
    add(out, text, strlen(text));
}

static void add_string(writer *out, const char *text)
{
    add(out, "\"", 1);
    for (; *text != '\0'; text++) {
        unsigned char byte = (unsigned char)*text;
        char escape[8];

        if (byte == '"' || byte == '\\' || byte < 0x20) {
            snprintf(escape, sizeof escape, "\\u%04x", byte);
            add_text(out, escape);
        } else {
            add(out, text, 1);
        }
    }

    add(out, "\"", 1);
}

static void add_number(writer *out, int64_t value)
{
    char digits[24];

    snprintf(digits, sizeof digits, "%" PRId64, value);
    add_text(out, digits);
}

/* The beginning of a member; `first` is for all but the first one of an object. */
static void add_key(writer *out, bool *first, const char *key)
{
    if (!*first)
        add(out, ",", 1);

    *first = false;
    add_string(out, key);
    add(out, ":", 1);
}

static void add_shapes(writer *out, const sg_shape *shapes, size_t count)
{
    bool first = true;

    add(out, "{", 1);
    for (size_t i = 0; i < count; i++) {
        add_key(out, &first, shapes[i].input);
        add(out, "[", 1);
        for (int d = 0; d < shapes[i].rank && d < SG_MAX_RANK; d++) {
            if (d > 0)
                add(out, ",", 1);

            add_number(out, shapes[i].shape[d]);
        }

        add(out, "]", 1);
    }

    add(out, "}", 1);
}

/* --- JSON, read --------------------------------------------------------------------------- */

enum kind { OBJECT, ARRAY, STRING, NUMBER, TRUE, FALSE, NOTHING };

/* A value, and where the one after it stands: all in between lie within it.  In an object keys and
 * values alternate.  Strings are without their quotes. */
typedef struct {
    enum kind kind;
    size_t start, end, next;
} node;

typedef struct {
    const char *text;
    size_t length, at;
    node *nodes;
    size_t count, room;
} document;

/* Node 0 is the whole, so no member is at 0. */
#define ABSENT 0

static void skip_blanks(document *doc)
{
    while (doc->at < doc->length && strchr(" \t\r\n", doc->text[doc->at]) != NULL)
        doc->at++;
}

static bool take(document *doc, char wanted)
{
    skip_blanks(doc);
    if (doc->at >= doc->length || doc->text[doc->at] != wanted)
        return false;

    doc->at++;
    return true;
}

/* The index of a new node, or SIZE_MAX. */
static size_t new_node(document *doc, enum kind kind)
{
    if (doc->count == doc->room) {
        size_t room = doc->room == 0 ? 64 : 2 * doc->room;
        node *grown = doc->count >= MAX_NODES ? NULL : realloc(doc->nodes, room * sizeof *grown);

        if (grown == NULL)
            return SIZE_MAX;

        doc->nodes = grown;
        doc->room = room;
    }

    doc->nodes[doc->count] = (node){.kind = kind, .start = doc->at, .end = doc->at};
    return doc->count++;
}

static bool read_string(document *doc)
{
    size_t index = new_node(doc, STRING);

    if (index == SIZE_MAX)
        return false;

    for (; doc->at < doc->length; doc->at++) {
        unsigned char byte = (unsigned char)doc->text[doc->at];

        if (byte == '"') {
            doc->nodes[index].end = doc->at++;
            doc->nodes[index].next = doc->count;
            return true;
        }

        if (byte < 0x20)
            return false;

        if (byte == '\\') {
            if (++doc->at >= doc->length
                || strchr("\"\\/bfnrtu", doc->text[doc->at]) == NULL)
                return false;

            if (doc->text[doc->at] == 'u') {
                if (doc->length - doc->at < 5)
                    return false;

                for (int i = 0; i < 4; i++)
                    if (strchr("0123456789abcdefABCDEF", doc->text[++doc->at]) == NULL)
                        return false;
            }
        }
    }

    return false;
}

static bool read_word(document *doc, const char *word, enum kind kind)
{
    size_t length = strlen(word), index = new_node(doc, kind);

    if (index == SIZE_MAX || doc->length - doc->at < length
        || memcmp(doc->text + doc->at, word, length) != 0)
        return false;

    doc->at += length;
    doc->nodes[index].end = doc->at;
    doc->nodes[index].next = doc->count;
    return true;
}

static bool read_number(document *doc)
{
    size_t index = new_node(doc, NUMBER), start = doc->at;

    /* Coarse: a number that is used is read again, exactly, by integer_of(). */
    while (doc->at < doc->length && strchr("+-.0123456789eE", doc->text[doc->at]) != NULL)
        doc->at++;

    if (index == SIZE_MAX || doc->at == start)
        return false;

    doc->nodes[index].end = doc->at;
    doc->nodes[index].next = doc->count;
    return true;
}

static bool read_value(document *doc, int depth);

static bool read_members(document *doc, enum kind kind, int depth)
{
    char close = kind == OBJECT ? '}' : ']';
    size_t index = new_node(doc, kind);

    if (index == SIZE_MAX || depth >= MAX_NESTING)
        return false;

    if (!take(doc, close)) {
        do {
            if (kind == OBJECT && !(take(doc, '"') && read_string(doc) && take(doc, ':')))
                return false;

            if (!read_value(doc, depth + 1))
                return false;
        } while (take(doc, ','));

        if (!take(doc, close))
            return false;
    }

    doc->nodes[index].end = doc->at;
    doc->nodes[index].next = doc->count;
    return true;
}

static bool read_value(document *doc, int depth)
{
    skip_blanks(doc);
    if (doc->at >= doc->length)
        return false;

    switch (doc->text[doc->at]) {
    case '{':
        doc->at++;
        return read_members(doc, OBJECT, depth);
    case '[':
        doc->at++;
        return read_members(doc, ARRAY, depth);
    case '"':
        doc->at++;
        return read_string(doc);
    case 't':
        return read_word(doc, "true", TRUE);
    case 'f':
        return read_word(doc, "false", FALSE);
    case 'n':
        return read_word(doc, "null", NOTHING);
    default:
        return read_number(doc);
    }
}

/* Whether `text`, in which there is no NUL, is one JSON object within the bounds.  Free doc->nodes
 * in any case. */
static bool read_document(document *doc, const char *text, size_t length)
{
    *doc = (document){.text = text, .length = length};
    if (!read_value(doc, 0) || doc->nodes[0].kind != OBJECT)
        return false;

    skip_blanks(doc);
    return doc->at == doc->length;
}

static int hex_of(const char *digits)
{
    int value = 0;

    for (int i = 0; i < 4; i++) {
        char digit = digits[i];

        value = value * 16 + (digit <= '9' ? digit - '0' : (digit | 0x20) - 'a' + 10);
    }

    return value;
}

/* Writes a string's characters and a NUL; cut where there is no room. */
static void copy_string(const document *doc, size_t index, char *target, size_t room)
{
    const node *found = &doc->nodes[index];
    size_t length = 0;

    if (found->kind != STRING) {
        target[0] = '\0';
        return;
    }

    for (size_t at = found->start; at < found->end; at++) {
        char bytes[4];
        size_t count = 1;

        bytes[0] = doc->text[at];
        if (bytes[0] == '\\') {
            char letter = doc->text[++at];

            if (letter == 'u') {
                uint32_t point = (uint32_t)hex_of(doc->text + at + 1);

                at += 4;
                if (point >= 0xD800 && point < 0xDC00 && found->end - at > 6
                    && doc->text[at + 1] == '\\' && doc->text[at + 2] == 'u') {
                    uint32_t low = (uint32_t)hex_of(doc->text + at + 3);

                    if (low >= 0xDC00 && low < 0xE000) {
                        point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
                        at += 6;
                    }
                }

                if (point == 0 || (point >= 0xD800 && point < 0xE000))
                    point = '?';

                if (point < 0x80) {
                    bytes[0] = (char)point;
                } else if (point < 0x800) {
                    bytes[0] = (char)(0xC0 | point >> 6);
                    bytes[1] = (char)(0x80 | (point & 0x3F));
                    count = 2;
                } else if (point < 0x10000) {
                    bytes[0] = (char)(0xE0 | point >> 12);
                    bytes[1] = (char)(0x80 | (point >> 6 & 0x3F));
                    bytes[2] = (char)(0x80 | (point & 0x3F));
                    count = 3;
                } else {
                    bytes[0] = (char)(0xF0 | point >> 18);
                    bytes[1] = (char)(0x80 | (point >> 12 & 0x3F));
                    bytes[2] = (char)(0x80 | (point >> 6 & 0x3F));
                    bytes[3] = (char)(0x80 | (point & 0x3F));
                    count = 4;
                }
            } else {
                const char *from = "bfnrt", *to = "\b\f\n\r\t";
                const char *place = strchr(from, letter);

                bytes[0] = place != NULL ? to[place - from] : letter;
            }
        }

        if (length + count >= room)
            break;

        memcpy(target + length, bytes, count);
        length += count;
    }

    target[length] = '\0';
}

static bool is_string(const document *doc, size_t index, const char *wanted)
{
    const node *found = &doc->nodes[index];
    size_t length = strlen(wanted);

    return found->kind == STRING && found->end - found->start == length
           && memcmp(doc->text + found->start, wanted, length) == 0;
}

/* A member of an object, ABSENT where there is none (or it is null). */
static size_t member(const document *doc, size_t object, const char *key)
{
    if (doc->nodes[object].kind != OBJECT)
        return ABSENT;

    for (size_t at = object + 1; at < doc->nodes[object].next; at = doc->nodes[at + 1].next)
        if (is_string(doc, at, key))
            return doc->nodes[at + 1].kind == NOTHING ? ABSENT : at + 1;

    return ABSENT;
}

/* How many values an array has; SIZE_MAX where it is none. */
static size_t length_of(const document *doc, size_t array)
{
    size_t count = 0;

    if (array == ABSENT || doc->nodes[array].kind != ARRAY)
        return SIZE_MAX;

    for (size_t at = array + 1; at < doc->nodes[array].next; at = doc->nodes[at].next)
        count++;

    return count;
}

/* An integer between `least` and `most`; false for anything else. */
static bool integer_of(const document *doc, size_t index, int64_t least, int64_t most,
                       int64_t *value)
{
    char digits[24], *end;
    size_t length;

    if (index == ABSENT || doc->nodes[index].kind != NUMBER)
        return false;

    length = doc->nodes[index].end - doc->nodes[index].start;
    if (length >= sizeof digits)
        return false;

    memcpy(digits, doc->text + doc->nodes[index].start, length);
    digits[length] = '\0';
    errno = 0;
    *value = strtoll(digits, &end, 10);
    return errno == 0 && end == digits + length && *value >= least && *value <= most;
}

static bool member_integer(const document *doc, size_t object, const char *key, int64_t least,
                           int64_t most, int64_t *value)
{
    return integer_of(doc, member(doc, object, key), least, most, value);
}

/* --- the control connection --------------------------------------------------------------- */

struct sg_client {
    int fd;
    char *buffer;             /* [consumed, length) is not used yet */
    size_t consumed, length, room;
    bool broken;              /* out of step with the daemon: nothing more can be asked */
    int fds[MAX_DESCRIPTORS]; /* that came with the present message */
    size_t fd_count;
};

static void close_fds(sg_client *client)
{
    for (size_t i = 0; i < client->fd_count; i++)
        if (client->fds[i] >= 0)
            close(client->fds[i]);

    client->fd_count = 0;
}

static int broken(sg_client *client, sg_error *error, int code, const char *text)
{
    client->broken = true;
    return fail(error, code, "%s", text);
}

static int default_path(char *path, size_t room)
{
    const char *named = getenv("SWITCHGEAR_SOCKET"), *runtime = getenv("XDG_RUNTIME_DIR");
    const char *temporary = getenv("TMPDIR");
    struct stat status;
    int length;

    if (named != NULL && named[0] != '\0')
        return snprintf(path, room, "%s", named);

    if (runtime != NULL && runtime[0] != '\0')
        length = snprintf(path, room, "%s/switchgear/switchgear.sock", runtime);
    else
        length = snprintf(path, room, "%s/switchgear-%ld/switchgear.sock",
                          temporary != NULL && temporary[0] != '\0' ? temporary : "/tmp",
                          (long)geteuid());

    /* Anybody may make a file in a shared folder: only this user's own socket counts. */
    if (length >= 0 && (size_t)length < room && lstat(path, &status) == 0
        && status.st_uid == geteuid())
        return length;

    return snprintf(path, room, "%s", SYSTEM_SOCKET);
}

sg_client *sg_connect(const char *path, int timeout_ms, sg_error *error)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval limit = {.tv_sec = timeout_ms / 1000, .tv_usec = timeout_ms % 1000 * 1000};
    int length = path != NULL ? snprintf(address.sun_path, sizeof address.sun_path, "%s", path)
                              : default_path(address.sun_path, sizeof address.sun_path);
    sg_client *client;

    if (length < 0 || (size_t)length >= sizeof address.sun_path) {
        fail(error, SG_BAD_REQUEST, "a socket's path has at most 107 bytes");
        return NULL;
    }

    client = calloc(1, sizeof *client);
    if (client == NULL) {
        no_memory(error);
        return NULL;
    }

    client->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    /* A full backlog makes connect() wait. */
    if (client->fd >= 0 && timeout_ms >= 0)
        setsockopt(client->fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);

    if (client->fd < 0
        || connect(client->fd, (struct sockaddr *)&address, sizeof address) != 0) {
        int reason = errno;
        int code = reason == EACCES || reason == EPERM ? SG_PERMISSION_DENIED : SG_NOT_RUNNING;

        fail(error, code, "%s: %s", address.sun_path, strerror(reason));
        sg_disconnect(client);
        return NULL;
    }

    return client;
}

void sg_disconnect(sg_client *client)
{
    if (client == NULL)
        return;

    close_fds(client);
    if (client->fd >= 0)
        close(client->fd);

    free(client->buffer);
    free(client);
}

/* Sends all of it; the descriptor, where there is one, with the first byte. */
static int send_all(sg_client *client, const char *data, size_t length, int fd,
                    int64_t deadline, sg_error *error)
{
    union {
        char room[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;

    while (length > 0) {
        struct iovec part = {.iov_base = (void *)data, .iov_len = length};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
        ssize_t sent;

        if (fd >= 0) {
            struct cmsghdr *header;

            memset(&control, 0, sizeof control);
            message.msg_control = control.room;
            message.msg_controllen = sizeof control.room;
            header = CMSG_FIRSTHDR(&message);
            header->cmsg_level = SOL_SOCKET;
            header->cmsg_type = SCM_RIGHTS;
            header->cmsg_len = CMSG_LEN(sizeof fd);
            memcpy(CMSG_DATA(header), &fd, sizeof fd);
        }

        sent = sendmsg(client->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            data += sent;
            length -= (size_t)sent;
            fd = -1;
        } else if (errno == EAGAIN) {
            if (wait_for(client->fd, POLLOUT, deadline) == 0)
                return broken(client, error, SG_TIMED_OUT, "the daemon takes no call");
        } else if (errno == EBADF) {
            /* Nothing was sent: the descriptor that the caller gave is none. */
            return fail(error, SG_BAD_REQUEST, "not an open descriptor");
        } else if (errno != EINTR) {
            return broken(client, error, SG_CONNECTION_LOST, "the daemon went away");
        }
    }

    return 0;
}

/* Takes the descriptors of a receive; those beyond the bound are closed.  False: some are lost. */
static bool take_fds(sg_client *client, struct msghdr *message)
{
    bool whole = (message->msg_flags & MSG_CTRUNC) == 0;

    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header != NULL;
         header = CMSG_NXTHDR(message, header)) {
        size_t count;

        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;

        count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
            if (client->fd_count < MAX_DESCRIPTORS) {
                client->fds[client->fd_count++] = fd;
            } else {
                close(fd);
                whole = false;
            }
        }
    }

    return whole;
}

/* One receive into the buffer. */
static int receive_some(sg_client *client, int64_t deadline, sg_error *error)
{
    union {
        char room[CMSG_SPACE(MAX_DESCRIPTORS * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec part;
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    ssize_t got;

    if (client->room - client->length < READ_BYTES) {
        char *grown = realloc(client->buffer, client->length + READ_BYTES);

        if (grown == NULL) {
            client->broken = true;
            return no_memory(error);
        }

        client->buffer = grown;
        client->room = client->length + READ_BYTES;
    }

    for (;;) {
        part = (struct iovec){client->buffer + client->length, client->room - client->length};
        message.msg_control = control.room;
        message.msg_controllen = sizeof control.room;
        got = recvmsg(client->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got > 0)
            break;

        if (got == 0 || (errno != EAGAIN && errno != EINTR))
            return broken(client, error, SG_CONNECTION_LOST, "the daemon went away");

        if (errno == EAGAIN && wait_for(client->fd, POLLIN, deadline) == 0)
            return broken(client, error, SG_TIMED_OUT, "the daemon does not answer");
    }

    client->length += (size_t)got;
    if (!take_fds(client, &message))
        return broken(client, error, SG_PROTOCOL_ERROR, "descriptors of an answer were lost");

    return 0;
}

/* The next message: [*start, *start + *length) in the buffer until the next call. */
static int receive_message(sg_client *client, int64_t deadline, const char **start,
                           size_t *length, sg_error *error)
{
    size_t searched = 0;

    if (client->consumed > 0) {
        client->length -= client->consumed;
        memmove(client->buffer, client->buffer + client->consumed, client->length);
        client->consumed = 0;
    }

    for (;;) {
        char *end = client->length == 0 ? NULL
                    : memchr(client->buffer + searched, '\0', client->length - searched);

        if (end != NULL) {
            *start = client->buffer;
            *length = (size_t)(end - client->buffer);
            client->consumed = *length + 1;
            return 0;
        }

        searched = client->length;
        if (searched > MAX_MESSAGE_BYTES)
            return broken(client, error, SG_PROTOCOL_ERROR, "an answer is too long");

        if (receive_some(client, deadline, error) != 0)
            return -1;
    }
}

/* An error reply's fields. */
static int error_of(const document *doc, size_t name, size_t parameters, sg_error *error)
{
    char full[128];
    const char *dot;
    size_t details;
    int64_t value;

    if (error == NULL)
        return -1;

    memset(error, 0, sizeof *error);
    copy_string(doc, name, full, sizeof full);
    dot = strrchr(full, '.');
    put_string(error->name, sizeof error->name, dot != NULL ? dot + 1 : full);
    error->code = strncmp(full, INTERFACE, strlen(INTERFACE)) == 0 ? code_of_error(error->name)
                                                                   : SG_BAD_REQUEST;
    if (parameters == ABSENT) {
        put_string(error->text, sizeof error->text, full);
        return -1;
    }

    if (member_integer(doc, parameters, "code", 1, INT_MAX, &value))
        error->code = (int)value;

    copy_string(doc, member(doc, parameters, "message"), error->text, sizeof error->text);
    details = member(doc, parameters, "details");
    if (details != ABSENT) {
        if (member_integer(doc, details, "retry_after_ms", 0, INT64_MAX, &value))
            error->retry_after_ms = value;

        if (member_integer(doc, details, "driver_code", INT_MIN, INT_MAX, &value))
            error->driver_code = (int)value;

        copy_string(doc, member(doc, details, "domain"), error->domain, sizeof error->domain);
    }

    return -1;
}

/* The next reply: `parameters` is an object in `doc`, whose nodes the caller frees in any case. */
static int receive_reply(sg_client *client, int64_t deadline, document *doc, size_t *parameters,
                         bool *continues, sg_error *error)
{
    const char *text = "";
    size_t length = 0, name;

    doc->nodes = NULL;
    if (receive_message(client, deadline, &text, &length, error) != 0)
        return -1;

    if (!read_document(doc, text, length))
        return broken(client, error, SG_PROTOCOL_ERROR, "an answer is no JSON object");

    name = member(doc, 0, "error");
    *parameters = member(doc, 0, "parameters");
    if (*parameters != ABSENT && doc->nodes[*parameters].kind != OBJECT)
        return broken(client, error, SG_PROTOCOL_ERROR, "an answer's parameters are no object");

    if (name != ABSENT)
        return error_of(doc, name, *parameters, error);

    if (*parameters == ABSENT)
        return broken(client, error, SG_PROTOCOL_ERROR, "an answer has no parameters");

    name = member(doc, 0, "continues");
    *continues = name != ABSENT && doc->nodes[name].kind == TRUE;
    return 0;
}

/* Sends a call.  Takes over the writer, which holds the parameters. */
static int send_call(sg_client *client, const char *method, bool more, writer *parameters,
                     int fd, int64_t deadline, sg_error *error)
{
    writer message = {0};
    int status;

    close_fds(client);
    add_text(&message, "{\"method\":\"" INTERFACE);
    add_text(&message, method);
    add_text(&message, more ? "\",\"more\":true,\"parameters\":" : "\",\"parameters\":");
    add(&message, parameters->data, parameters->length);
    add(&message, "}", 2); /* with its NUL */
    message.failed = message.failed || parameters->failed;
    free(parameters->data);
    if (message.failed)
        status = fail(error, SG_BAD_REQUEST, "a call is too long, or there is no memory");
    else if (client->broken)
        status = fail(error, SG_CONNECTION_LOST, "this connection failed before: make another");
    else
        status = send_all(client, message.data, message.length, fd, deadline, error);

    free(message.data);
    return status;
}

/* A call and its one reply. */
static int transact(sg_client *client, const char *method, writer *parameters, int fd,
                    int64_t deadline, document *doc, size_t *reply, sg_error *error)
{
    bool continues = false;

    doc->nodes = NULL;
    if (send_call(client, method, false, parameters, fd, deadline, error) != 0
        || receive_reply(client, deadline, doc, reply, &continues, error) != 0)
        return -1;

    if (continues)
        return broken(client, error, SG_PROTOCOL_ERROR, "an answer goes on that must not");

    return 0;
}

int sg_call(sg_client *client, const char *method, const char *parameters, int timeout_ms,
            char **reply, sg_error *error)
{
    writer out = {0};
    document doc;
    size_t found;
    int status;

    for (const char *letter = method; *letter != '\0'; letter++)
        if (*letter == '"' || *letter == '\\' || (unsigned char)*letter < 0x20)
            return fail(error, SG_BAD_REQUEST, "no name of a method");

    add_text(&out, parameters != NULL ? parameters : "{}");
    status = transact(client, method, &out, -1, deadline_of(timeout_ms), &doc, &found, error);
    if (status == 0) {
        *reply = strndup(doc.text + doc.nodes[found].start - 1,
                         doc.nodes[found].end - doc.nodes[found].start + 1);
        if (*reply == NULL)
            status = no_memory(error);
    }

    free(doc.nodes);
    return status;
}

/* Waits for the end of a job; `hash` gets that of the model that it made. */
static int follow(sg_client *client, int64_t job, int64_t deadline, char hash[65],
                  sg_error *error)
{
    writer out = {0};
    bool continues = true;

    add_text(&out, "{\"job\":");
    add_number(&out, job);
    add_text(&out, "}");
    if (send_call(client, "WatchJob", true, &out, -1, deadline, error) != 0)
        return -1;

    for (;;) {
        document doc;
        size_t reply, state;
        int status = receive_reply(client, deadline, &doc, &reply, &continues, error);

        if (status == 0 && !continues) {
            state = member(&doc, reply, "state");
            if (state == ABSENT)
                status = broken(client, error, SG_PROTOCOL_ERROR, "a job without a state");
            else if (!is_string(&doc, state, "done")) {
                size_t name = member(&doc, reply, "error");
                size_t parameters = member(&doc, reply, "parameters");

                if (name == ABSENT)
                    status = broken(client, error, SG_PROTOCOL_ERROR, "a job's end says nothing");
                else
                    status = error_of(&doc, name, parameters, error);
            } else if (hash != NULL) {
                size_t result = member(&doc, reply, "result");

                hash[0] = '\0';
                if (result != ABSENT && member(&doc, result, "model") != ABSENT)
                    copy_string(&doc, member(&doc, result, "model"), hash, 65);
            }
        }

        free(doc.nodes);
        if (status != 0 || !continues)
            return status;
    }
}

static int run_job(sg_client *client, const char *method, writer *parameters, int fd,
                   int timeout_ms, char hash[65], sg_error *error)
{
    int64_t deadline = deadline_of(timeout_ms), job;
    document doc;
    size_t reply;
    int status = transact(client, method, parameters, fd, deadline, &doc, &reply, error);

    if (status == 0 && !member_integer(&doc, reply, "job", 0, INT64_MAX, &job))
        status = broken(client, error, SG_PROTOCOL_ERROR, "an answer names no job");

    free(doc.nodes);
    return status != 0 ? status : follow(client, job, deadline, hash, error);
}

int sg_load_model_fd(sg_client *client, int fd, const char *name, int timeout_ms, char hash[65],
                     sg_error *error)
{
    writer out = {0};

    if (fd < 0)
        return fail(error, SG_BAD_REQUEST, "not an open descriptor");

    add_text(&out, "{\"descriptor\":0");
    if (name != NULL) {
        add_text(&out, ",\"name\":");
        add_string(&out, name);
    }

    add_text(&out, "}");
    return run_job(client, "LoadModel", &out, fd, timeout_ms, hash, error);
}

int sg_load_model(sg_client *client, const char *file, const char *name, int timeout_ms,
                  char hash[65], sg_error *error)
{
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    int status;

    if (fd < 0)
        return fail(error, SG_BAD_REQUEST, "%s: %s", file, strerror(errno));

    status = sg_load_model_fd(client, fd, name, timeout_ms, hash, error);
    close(fd);
    return status;
}

int sg_prepare_shapes(sg_client *client, const char *model, const sg_shape *shapes,
                      size_t shape_count, int timeout_ms, sg_error *error)
{
    writer out = {0};

    add_text(&out, "{\"model\":");
    add_string(&out, model);
    add_text(&out, ",\"input_shapes\":");
    add_shapes(&out, shapes, shape_count);
    add_text(&out, "}");
    return run_job(client, "PrepareShapes", &out, -1, timeout_ms, NULL, error);
}

int sg_unload_model(sg_client *client, const char *model, bool force, int timeout_ms,
                    sg_error *error)
{
    writer out = {0};
    document doc;
    size_t reply;
    int status;

    add_text(&out, "{\"model\":");
    add_string(&out, model);
    add_text(&out, force ? ",\"force\":true}" : "}");
    status = transact(client, "UnloadModel", &out, -1, deadline_of(timeout_ms), &doc, &reply,
                      error);
    free(doc.nodes);
    return status;
}

/* --- sessions ----------------------------------------------------------------------------- */

static const struct {
    const char *name;
    size_t bytes;
} dtypes[] = {{"", 0}, {"float32", 4}, {"float16", 2}, {"float64", 8}, {"int8", 1}, {"uint8", 1},
    {"int16", 2}, {"uint16", 2}, {"int32", 4}, {"uint32", 4}, {"int64", 8}, {"uint64", 8},
    {"bool", 1}, {"complex64", 8}};

enum slot_state { IDLE, IN_FLIGHT, ENDED };

typedef struct {
    size_t offset, length;
} place;

typedef struct {
    enum slot_state state;
    uint64_t request_id;
    uint16_t output_slot;     /* ours beside the input slot; while in flight, the daemon's */
    uint8_t reply[RECORD_BYTES];
    sg_output *outputs;
} slot;

struct sg_session {
    int fd;
    uint8_t *arena;
    size_t arena_bytes;
    uint32_t epoch;
    bool stateful;
    size_t slot_count, output_slot_count, input_count, output_count;
    sg_tensor inputs[SG_MAX_TENSORS], outputs[SG_MAX_TENSORS];
    place *input_places, *output_places, *headers;
    slot slots[SG_MAX_SLOTS];
    uint64_t next_id;
    bool lost;
    sg_error loss;            /* why, once it is lost */
    int goaway;               /* what the daemon announced, 0 for nothing */
    sg_on_event on_event;     /* NULL: none were asked for */
    void *event_context;
    uint64_t event_count;
};

const char *sg_dtype_name(sg_dtype dtype)
{
    return (size_t)dtype < COUNT(dtypes) ? dtypes[dtype].name : "";
}

size_t sg_dtype_bytes(sg_dtype dtype)
{
    return (size_t)dtype < COUNT(dtypes) ? dtypes[dtype].bytes : 0;
}

/* Little-endian numbers at any address. */
static uint64_t get(const uint8_t *data, size_t bytes)
{
    uint64_t value = 0;

    while (bytes > 0)
        value = value << 8 | data[--bytes];

    return value;
}

static void put(uint8_t *data, size_t bytes, uint64_t value)
{
    for (size_t i = 0; i < bytes; i++, value >>= 8)
        data[i] = (uint8_t)value;
}

static bool read_tensors(const document *doc, size_t array, sg_tensor *tensors, size_t *count)
{
    size_t found = length_of(doc, array), at = array + 1;

    if (found > SG_MAX_TENSORS)
        return false;

    for (*count = 0; *count < found; at = doc->nodes[at].next, ++*count) {
        sg_tensor *tensor = &tensors[*count];
        size_t name = member(doc, at, "name"), shape = member(doc, at, "shape");
        size_t dtype = member(doc, at, "dtype"), rank = length_of(doc, shape);
        size_t flag = member(doc, at, "dynamic"), room, dim;
        char *copy;

        if (name == ABSENT || doc->nodes[name].kind != STRING || dtype == ABSENT
            || rank > SG_MAX_RANK)
            return false;

        tensor->rank = (int)rank;
        dim = shape + 1;
        for (size_t d = 0; d < rank; d++, dim = doc->nodes[dim].next) {
            int64_t value;

            /* -1: known only after a run. */
            if (!integer_of(doc, dim, -1, UINT32_MAX, &value))
                return false;

            tensor->shape[d] = value < 0 ? 0 : (uint32_t)value;
        }

        tensor->dtype = 0;
        for (size_t d = 1; d < COUNT(dtypes); d++)
            if (is_string(doc, dtype, dtypes[d].name))
                tensor->dtype = (sg_dtype)d;

        tensor->dynamic = flag != ABSENT && doc->nodes[flag].kind == TRUE;
        room = doc->nodes[name].end - doc->nodes[name].start + 1;
        copy = malloc(room);
        if (copy == NULL)
            return false;

        copy_string(doc, name, copy, room);
        tensor->name = copy;
        if (tensor->dtype == 0) {
            ++*count;
            return false;
        }
    }

    return true;
}

static bool read_place(const document *doc, size_t array, size_t arena_bytes, size_t align,
                       size_t least, place *found)
{
    int64_t chunk, offset, length;
    size_t first = array + 1, second, third;

    if (length_of(doc, array) != 3)
        return false;

    second = doc->nodes[first].next;
    third = doc->nodes[second].next;
    if (!integer_of(doc, first, 0, 0, &chunk)
        || !integer_of(doc, second, 0, (int64_t)arena_bytes, &offset)
        || !integer_of(doc, third, 0, (int64_t)arena_bytes - offset, &length)
        || (size_t)offset % align != 0 || (size_t)length < least)
        return false;

    *found = (place){(size_t)offset, (size_t)length};
    return true;
}

/* How many bytes the tensor takes in its own shape; SIZE_MAX where that is beyond any memory. */
static size_t bytes_of(sg_dtype dtype, int rank, const uint32_t *shape)
{
    size_t bytes = sg_dtype_bytes(dtype);

    for (int d = 0; d < rank; d++)
        if (__builtin_mul_overflow(bytes, (size_t)shape[d], &bytes))
            return SIZE_MAX;

    return bytes;
}

/* `slot_count` slots of `count` tensors each; allocates. */
static place *read_places(const document *doc, size_t array, size_t slot_count, size_t count,
                          const sg_tensor *tensors, size_t arena_bytes)
{
    place *places;
    size_t at = array + 1;

    if (length_of(doc, array) != slot_count)
        return NULL;

    places = calloc(slot_count * count + 1, sizeof *places);
    if (places == NULL)
        return NULL;

    for (size_t s = 0; s < slot_count; s++, at = doc->nodes[at].next) {
        size_t tensor = at + 1;

        if (length_of(doc, at) != count)
            goto bad;

        for (size_t t = 0; t < count; t++, tensor = doc->nodes[tensor].next) {
            const sg_tensor *spec = &tensors[t];
            size_t least = spec->dynamic ? 0 : bytes_of(spec->dtype, spec->rank, spec->shape);

            if (!read_place(doc, tensor, arena_bytes, TENSOR_ALIGN_BYTES, least,
                            &places[s * count + t]))
                goto bad;
        }
    }

    return places;
bad:
    free(places);
    return NULL;
}

static place *read_headers(const document *doc, size_t array, size_t slot_count, size_t least,
                           size_t arena_bytes)
{
    place *places;
    size_t at = array + 1;

    if (length_of(doc, array) != slot_count)
        return NULL;

    places = calloc(slot_count, sizeof *places);
    for (size_t s = 0; places != NULL && s < slot_count; s++, at = doc->nodes[at].next)
        if (!read_place(doc, at, arena_bytes, 1, least, &places[s])) {
            free(places);
            return NULL;
        }

    return places;
}

static bool read_layout(sg_session *session, const document *doc, size_t reply)
{
    size_t layout = member(doc, reply, "layout"), flag = member(doc, reply, "state");
    size_t header = HEADER_BYTES;
    int64_t epoch, slots, output_slots, bytes;

    if (layout == ABSENT || !member_integer(doc, reply, "epoch", 0, UINT32_MAX, &epoch)
        || !member_integer(doc, reply, "slots", 1, SG_MAX_SLOTS, &slots)
        || !member_integer(doc, reply, "output_slots", slots, MAX_OUTPUT_SLOTS, &output_slots)
        || !member_integer(doc, layout, "size_bytes", 1, PTRDIFF_MAX, &bytes)
        || !read_tensors(doc, member(doc, reply, "inputs"), session->inputs,
                         &session->input_count)
        || !read_tensors(doc, member(doc, reply, "outputs"), session->outputs,
                         &session->output_count))
        return false;

    session->epoch = (uint32_t)epoch;
    session->stateful = flag != ABSENT && doc->nodes[flag].kind == TRUE;
    session->slot_count = (size_t)slots;
    session->output_slot_count = (size_t)output_slots;
    session->arena_bytes = (size_t)bytes;
    header += session->output_count * ENTRY_BYTES;
    session->input_places = read_places(doc, member(doc, layout, "inputs"), session->slot_count,
                                        session->input_count, session->inputs,
                                        session->arena_bytes);
    session->output_places = read_places(doc, member(doc, layout, "outputs"),
                                         session->output_slot_count, session->output_count,
                                         session->outputs, session->arena_bytes);
    session->headers = read_headers(doc, member(doc, layout, "headers"),
                                    session->output_slot_count, header, session->arena_bytes);
    if (session->input_places == NULL || session->output_places == NULL
        || session->headers == NULL)
        return false;

    for (size_t t = 0; t < session->input_count; t++)
        session->inputs[t].capacity_bytes = session->input_places[t].length;

    for (size_t t = 0; t < session->output_count; t++)
        session->outputs[t].capacity_bytes = session->output_places[t].length;

    for (size_t s = 0; s < session->slot_count; s++) {
        session->slots[s].output_slot = (uint16_t)s;
        session->slots[s].outputs = calloc(session->output_count + 1, sizeof(sg_output));
        if (session->slots[s].outputs == NULL)
            return false;
    }

    return true;
}

/* Takes a descriptor out of those that came with the reply. */
static int take_fd(sg_client *client, const document *doc, size_t reply, const char *key)
{
    int64_t index;
    int fd;

    if (!member_integer(doc, reply, key, 0, MAX_DESCRIPTORS - 1, &index)
        || (size_t)index >= client->fd_count)
        return -1;

    fd = client->fds[index];
    client->fds[index] = -1;
    return fd;
}

/* Maps the arena.  One that could shrink would end this process with SIGBUS. */
static bool map_arena(sg_session *session, int fd)
{
    struct stat status;
    void *memory;
    int seals;

    if (fd < 0 || fstat(fd, &status) != 0 || (uint64_t)status.st_size < session->arena_bytes)
        return false;

    seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
        return false;

    memory = mmap(NULL, session->arena_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return false;

    session->arena = memory;
    return true;
}

static bool is_packet_socket(int fd)
{
    int type = 0;
    socklen_t size = sizeof type;

    return fd >= 0 && getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0
           && type == SOCK_SEQPACKET;
}

static void add_options(writer *out, const sg_session_options *options)
{
    bool first = true;

    add_text(out, "{");
    add_key(out, &first, "model");
    add_string(out, options->model);
    if (options->slots != 0) {
        add_key(out, &first, "slots");
        add_number(out, options->slots);
    }

    if (options->on_busy != NULL) {
        add_key(out, &first, "on_busy");
        add_string(out, options->on_busy);
    }

    if (options->priority != NULL) {
        add_key(out, &first, "priority");
        add_string(out, options->priority);
    }

    if (options->backends != NULL) {
        add_key(out, &first, "backends");
        add_text(out, "[");
        for (size_t i = 0; i < options->backend_count; i++) {
            if (i > 0)
                add_text(out, ",");

            add_string(out, options->backends[i]);
        }

        add_text(out, "]");
    }

    if (options->strict) {
        add_key(out, &first, "strict");
        add_text(out, "true");
    }

    if (options->shape_count > 0) {
        add_key(out, &first, "input_shapes");
        add_shapes(out, options->shapes, options->shape_count);
    }

    if (options->output_capacity_bytes > 0) {
        add_key(out, &first, "output_capacity_bytes");
        add_number(out, options->output_capacity_bytes);
    }

    if (options->on_event != NULL) {
        add_key(out, &first, "events");
        add_text(out, "true");
    }

    if (options->hedge) {
        add_key(out, &first, "hedge");
        add_text(out, "true");
    }

    add_text(out, "}");
}

sg_session *sg_open_session(sg_client *client, const sg_session_options *options, int timeout_ms,
                            sg_error *error)
{
    sg_session *session = calloc(1, sizeof *session);
    writer out = {0};
    document doc = {0};
    size_t reply;
    int status, arena = -1;

    if (session == NULL) {
        no_memory(error);
        return NULL;
    }

    session->fd = -1;
    session->next_id = 1;
    session->on_event = options->on_event;
    session->event_context = options->event_context;
    add_options(&out, options);
    status = transact(client, "OpenSession", &out, -1, deadline_of(timeout_ms), &doc, &reply,
                      error);
    if (status == 0) {
        session->fd = take_fd(client, &doc, reply, "socket");
        arena = take_fd(client, &doc, reply, "arena");
        if (!is_packet_socket(session->fd) || !read_layout(session, &doc, reply)
            || !map_arena(session, arena))
            status = fail(error, SG_PROTOCOL_ERROR, "what OpenSession answered does not fit");
    }

    free(doc.nodes);
    close_fds(client);
    if (arena >= 0)
        close(arena);

    if (status != 0) {
        sg_close_session(session);
        return NULL;
    }

    return session;
}

void sg_close_session(sg_session *session)
{
    if (session == NULL)
        return;

    if (session->fd >= 0)
        close(session->fd);

    if (session->arena != NULL)
        munmap(session->arena, session->arena_bytes);

    for (size_t t = 0; t < SG_MAX_TENSORS; t++) {
        free((void *)session->inputs[t].name);
        free((void *)session->outputs[t].name);
    }

    for (size_t s = 0; s < SG_MAX_SLOTS; s++)
        free(session->slots[s].outputs);

    free(session->input_places);
    free(session->output_places);
    free(session->headers);
    free(session);
}

int sg_slot_count(const sg_session *session) { return (int)session->slot_count; }
size_t sg_input_count(const sg_session *session) { return session->input_count; }
size_t sg_output_count(const sg_session *session) { return session->output_count; }
bool sg_is_stateful(const sg_session *session) { return session->stateful; }
uint32_t sg_epoch(const sg_session *session) { return session->epoch; }
int sg_session_fd(const sg_session *session) { return session->fd; }

const sg_tensor *sg_input_spec(const sg_session *session, size_t input)
{
    return input < session->input_count ? &session->inputs[input] : NULL;
}

const sg_tensor *sg_output_spec(const sg_session *session, size_t output)
{
    return output < session->output_count ? &session->outputs[output] : NULL;
}

static slot *slot_of(sg_session *session, int number)
{
    return number >= 0 && (size_t)number < session->slot_count ? &session->slots[number] : NULL;
}

void *sg_input(sg_session *session, int number, size_t input)
{
    if (slot_of(session, number) == NULL || input >= session->input_count)
        return NULL;

    return session->arena
           + session->input_places[(size_t)number * session->input_count + input].offset;
}

/* --- requests ----------------------------------------------------------------------------- */

/* The session is over; what is in flight ends with it. */
static void lose(sg_session *session, int code, const char *text)
{
    if (session->lost)
        return;

    session->lost = true;
    if (session->goaway != 0 && code == SG_CONNECTION_LOST)
        fail(&session->loss, code, "the daemon ended the session: %s",
             name_of_error(session->goaway));
    else
        fail(&session->loss, code, "%s", text);

    /* Nothing more may be sent, and the daemon learns of it. */
    shutdown(session->fd, SHUT_RDWR);
}

static int say_lost(const sg_session *session, sg_error *error)
{
    if (error != NULL)
        *error = session->loss;

    return -1;
}

/* A reply: to the slot that it answers. */
static void accept_reply(sg_session *session, const uint8_t *record)
{
    uint64_t id = get(record + 8, 8);
    size_t output = (size_t)get(record + 18, 2);
    bool failed = get(record + 56, 2) != DOMAIN_OK;
    slot *answered = NULL;

    for (size_t s = 0; s < session->slot_count; s++)
        if (session->slots[s].state == IN_FLIGHT && session->slots[s].request_id == id)
            answered = &session->slots[s];

    if (answered == NULL) {
        /* A record that was no request is answered with id 0, and the session is closed. */
        lose(session, failed ? SG_CONNECTION_LOST : SG_PROTOCOL_ERROR,
             "an answer to no request of ours");
        return;
    }

    if (output >= session->output_slot_count && !(output == NO_SLOT && failed)) {
        lose(session, SG_PROTOCOL_ERROR, "an answer names an output slot that there is not");
        return;
    }

    for (size_t s = 0; s < session->slot_count && output != NO_SLOT; s++)
        if (&session->slots[s] != answered && session->slots[s].output_slot == output) {
            lose(session, SG_PROTOCOL_ERROR, "an answer names an output slot of another request");
            return;
        }

    answered->output_slot = (uint16_t)output;
    answered->state = ENDED;
    memcpy(answered->reply, record, RECORD_BYTES);
    if (get(record + 56, 2) == DOMAIN_SWITCHGEAR && get(record + 60, 4) == SG_STATE_LOST)
        session->epoch = (uint32_t)get(record + 4, 4);
}

/* An event: to who asked for them. */
static void pass_event(sg_session *session, const uint8_t *record)
{
    uint32_t age = (uint32_t)get(record + 72, 4);
    int32_t headroom = (int32_t)(uint32_t)get(record + 80, 4);
    sg_event event = {
        .kind = NAME_OF(event_names, get(record + 64, 2)),
        .backend = NAME_OF(backend_names, record[58]),
        .precision = NAME_OF(precision_names, record[59]),
        .state = NAME_OF(event_names, record[68]),
        .device_state = NAME_OF(event_names, record[69]),
        .share = (double)get(record + 70, 2) / WHOLE_SHARE,
        .has_temperature = age != NO_READING && headroom != NO_HEADROOM,
        .retry_after_ms = (int64_t)get(record + 76, 4),
        .number = get(record + 8, 8),
        .epoch = (uint32_t)get(record + 4, 4),
        .at_ns = get(record + 32, 8),
    };

    if (session->on_event == NULL)
        return;

    if (event.has_temperature) {
        event.headroom_mc = headroom;
        event.temperature_age_ms = (int64_t)age;
    }

    session->event_count++;
    session->on_event(session->event_context, &event);
}

/* One receive: 1 something came, 0 the time is over.  A session that is lost tells so by itself. */
static int receive_record(sg_session *session, int64_t deadline)
{
    /* One more byte than a record: a longer packet must not look like one. */
    uint8_t record[RECORD_BYTES + 1];
    ssize_t got;

    for (;;) {
        /* Without a limit, one system call less. */
        got = recv(session->fd, record, sizeof record, deadline < 0 ? 0 : MSG_DONTWAIT);
        if (got >= 0 || (errno != EINTR && errno != EAGAIN))
            break;

        if (errno == EAGAIN && wait_for(session->fd, POLLIN, deadline) == 0)
            return 0;
    }

    if (got <= 0)
        lose(session, SG_CONNECTION_LOST, "the daemon closed the session");
    else if (got != RECORD_BYTES || record[1] != RECORD_VERSION)
        lose(session, SG_PROTOCOL_ERROR, "a packet that is no record");
    else if (record[0] == REPLY)
        accept_reply(session, record);
    else if (record[0] == GOAWAY)
        session->goaway = (int)(int32_t)get(record + 60, 4);
    else if (record[0] == EVENT)
        pass_event(session, record);
    else
        lose(session, SG_PROTOCOL_ERROR, "a record of an unknown type");

    return 1;
}

/* Takes what is there, without waiting. */
static void receive_some_records(sg_session *session)
{
    for (int i = 0; i < MAX_TAKEN && !session->lost; i++)
        if (receive_record(session, deadline_of(0)) == 0)
            return;
}

static int send_record(sg_session *session, const uint8_t *record, sg_error *error)
{
    for (;;) {
        if (send(session->fd, record, RECORD_BYTES, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
            return 0;

        if (errno == EAGAIN)
            return fail(error, SG_BUSY, "the daemon takes no records");

        if (errno != EINTR) {
            /* It may have said why, before it closed. */
            while (!session->lost && receive_record(session, deadline_of(0)) > 0)
                continue;

            lose(session, SG_CONNECTION_LOST, "the daemon went away");
            return say_lost(session, error);
        }
    }
}

int sg_submit(sg_session *session, int number, const sg_request *request, sg_error *error)
{
    static const sg_request usual;
    slot *used = slot_of(session, number);
    uint8_t record[RECORD_BYTES] = {0};

    if (used == NULL)
        return fail(error, SG_BAD_SLOT, "there is no slot %d", number);

    if (used->state == IN_FLIGHT)
        return fail(error, SG_SLOT_BUSY, "slot %d has a request in flight", number);

    if (session->lost)
        return say_lost(session, error);

    if (request == NULL)
        request = &usual;

    if (request->timeout_us < 0 || request->priority < 0 || request->priority > 3
        || request->capture_clock < 0 || request->capture_clock > 3)
        return fail(error, SG_BAD_REQUEST, "a request's fields are out of range");

    record[0] = INFER;
    record[1] = RECORD_VERSION;
    put(record + 2, 2, request->reset ? RESET : 0);
    put(record + 4, 4, session->epoch);
    put(record + 8, 8, session->next_id);
    put(record + 16, 2, (uint64_t)number);
    put(record + 18, 2, used->output_slot);
    record[20] = (uint8_t)request->priority;
    record[21] = (uint8_t)request->capture_clock;
    put(record + 24, 8, (uint64_t)request->timeout_us);
    put(record + 32, 8, request->capture_ns);
    memcpy(record + 40, request->trace_id, sizeof request->trace_id);
    if (send_record(session, record, error) != 0)
        return -1;

    used->state = IN_FLIGHT;
    used->request_id = session->next_id++;
    return 0;
}

int sg_cancel(sg_session *session, int number, sg_error *error)
{
    slot *used = slot_of(session, number);
    uint8_t record[RECORD_BYTES] = {0};

    if (used == NULL)
        return fail(error, SG_BAD_SLOT, "there is no slot %d", number);

    if (used->state != IN_FLIGHT || session->lost)
        return 0;

    record[0] = CANCEL;
    record[1] = RECORD_VERSION;
    put(record + 8, 8, used->request_id);
    return send_record(session, record, error);
}

/* The text of a failed run, from the place of the output slot's header. */
static void error_text(const sg_session *session, size_t output, char *text, size_t room)
{
    const place *header = &session->headers[output];
    uint8_t copy[8 + 255];
    size_t length = header->length < sizeof copy ? header->length : sizeof copy;

    text[0] = '\0';
    memcpy(copy, session->arena + header->offset, length);
    if (get(copy, 4) == ERROR_MAGIC) {
        size_t said = (size_t)get(copy + 4, 4);

        if (said > length - 8)
            said = length - 8;

        copy[8 + (said < 255 ? said : 254)] = '\0';
        put_string(text, room, (const char *)copy + 8);
    }
}

static int failure(const sg_session *session, const slot *ended, sg_error *error)
{
    const uint8_t *reply = ended->reply;
    size_t domain = (size_t)get(reply + 56, 2);
    int code = (int)(int32_t)get(reply + 60, 4);
    char text[256] = "";

    if (error == NULL)
        return -1;

    if (reply[58] != 0 && ended->output_slot != NO_SLOT)
        error_text(session, ended->output_slot, text, sizeof text);

    if (domain == DOMAIN_SWITCHGEAR) {
        fail(error, code, "%s", text[0] != '\0' ? text : name_of_error(code));
    } else {
        fail(error, SG_BACKEND_FAILED, "%s:%d %s", NAME_OF(domain_names, domain), code, text);
        put_string(error->domain, sizeof error->domain, NAME_OF(domain_names, domain));
        error->driver_code = code;
    }

    error->retry_after_ms = (int64_t)get(reply + 76, 4);
    return -1;
}

/* Reads the header that the worker wrote; believes nothing that the layout does not bear out. */
static bool read_outputs(const sg_session *session, slot *ended)
{
    size_t size = HEADER_BYTES + session->output_count * ENTRY_BYTES;
    const place *places = session->output_places + ended->output_slot * session->output_count;
    uint8_t header[HEADER_BYTES + SG_MAX_TENSORS * ENTRY_BYTES];

    memcpy(header, session->arena + session->headers[ended->output_slot].offset, size);
    if (get(header, 4) != SLOT_MAGIC || get(header + 4, 2) != 1
        || get(header + 6, 2) != session->output_count || get(header + 8, 8) != ended->request_id)
        return false;

    for (size_t t = 0; t < session->output_count; t++) {
        const uint8_t *entry = header + HEADER_BYTES + t * ENTRY_BYTES;
        sg_output *output = &ended->outputs[t];
        uint64_t length = get(entry + 8, 8);
        size_t rank = (size_t)get(entry + 2, 2);

        output->dtype = (sg_dtype)get(entry, 2);
        if (sg_dtype_bytes(output->dtype) == 0 || rank > SG_MAX_RANK
            || length > places[t].length)
            return false;

        output->rank = (int)rank;
        for (size_t d = 0; d < SG_MAX_RANK; d++)
            output->shape[d] = (uint32_t)get(entry + 16 + 4 * d, 4);

        output->bytes = (size_t)length;
        output->data = session->arena + places[t].offset;
        if (bytes_of(output->dtype, output->rank, output->shape) != output->bytes)
            return false;
    }

    return true;
}

/* How a request ended; its slot is idle from now on. */
static int finish(sg_session *session, int number, sg_result *result, sg_error *error)
{
    slot *ended = &session->slots[number];
    const uint8_t *reply = ended->reply;
    uint32_t age = (uint32_t)get(reply + 72, 4);

    if (ended->state == IN_FLIGHT) {
        ended->state = IDLE;
        return say_lost(session, error);
    }

    ended->state = IDLE;
    if (get(reply + 56, 2) != DOMAIN_OK)
        return failure(session, ended, error);

    if (!read_outputs(session, ended))
        return fail(error, SG_PROTOCOL_ERROR, "an output slot's header does not fit the session");

    if (result != NULL)
        *result = (sg_result){
            .slot = number,
            .request_id = ended->request_id,
            .outputs = ended->outputs,
            .output_count = session->output_count,
            .backend = NAME_OF(backend_names, reply[58]),
            .precision = NAME_OF(precision_names, reply[59]),
            .reason = (int)get(reply + 64, 2),
            .retries = (int)get(reply + 66, 2),
            .tried = (uint32_t)get(reply + 68, 4),
            .late = (get(reply + 2, 2) & LATE) != 0,
            .temperature_age_ms = age == NO_READING ? -1 : (int64_t)age,
            .queue_ns = get(reply + 80, 8),
            .run_ns = get(reply + 88, 8),
            .total_ns = get(reply + 96, 8),
        };

    return 0;
}

int sg_wait(sg_session *session, int number, int timeout_ms, sg_result *result, sg_error *error)
{
    slot *wanted = slot_of(session, number);
    int64_t deadline = deadline_of(timeout_ms);

    if (wanted == NULL)
        return fail(error, SG_BAD_SLOT, "there is no slot %d", number);

    if (wanted->state == IDLE)
        return fail(error, SG_BAD_SLOT, "slot %d has no request in flight", number);

    while (wanted->state == IN_FLIGHT && !session->lost)
        if (receive_record(session, deadline) == 0)
            return fail(error, SG_TIMED_OUT, "slot %d has no answer yet", number);

    return finish(session, number, result, error);
}

int sg_wait_any(sg_session *session, int timeout_ms, int *number, sg_result *result,
                sg_error *error)
{
    int64_t deadline = deadline_of(timeout_ms);

    *number = -1;
    for (;;) {
        size_t in_flight = 0;

        for (size_t s = 0; s < session->slot_count; s++) {
            enum slot_state state = session->slots[s].state;

            in_flight += state == IN_FLIGHT;
            if (state == ENDED || (state == IN_FLIGHT && session->lost)) {
                *number = (int)s;
                return finish(session, *number, result, error);
            }
        }

        if (in_flight == 0) {
            /* Who was woken by an event is not to be woken by it again. */
            receive_some_records(session);
            if (session->lost)
                return say_lost(session, error);

            return fail(error, SG_BAD_SLOT, "no request is in flight");
        }

        if (receive_record(session, deadline) == 0)
            return fail(error, SG_TIMED_OUT, "no request has an answer yet");
    }
}

int sg_take_events(sg_session *session, int timeout_ms, sg_error *error)
{
    int64_t deadline = deadline_of(timeout_ms);
    uint64_t before = session->event_count;

    receive_some_records(session);
    while (!session->lost && session->event_count == before)
        if (receive_record(session, deadline) == 0)
            return 0;

    /* Those that came before the end are told first. */
    if (session->event_count == before)
        return say_lost(session, error);

    return (int)(session->event_count - before);
}

int sg_run(sg_session *session, int number, const sg_request *request, sg_result *result,
           sg_error *error)
{
    if (sg_submit(session, number, request, error) != 0)
        return -1;

    return sg_wait(session, number, -1, result, error);
}
