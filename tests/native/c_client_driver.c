/* Drives client/c from a test: one command a line on stdin, one line of answer on stdout.
 *
 * Answers begin with "ok" or with "error CODE NAME RETRY_MS DOMAIN DRIVER_CODE TEXT".  Tensors are
 * float32 numbers. */
#define _GNU_SOURCE
#include "switchgear.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_WORDS 32

static sg_client *client;
static sg_session *session;

static void say_error(const sg_error *error)
{
    printf("error %d %s %" PRId64 " %s %d %s\n", error->code, error->name, error->retry_after_ms,
           error->domain[0] != '\0' ? error->domain : "-", error->driver_code, error->text);
}

static void outcome(int status, const sg_error *error, const char *text)
{
    if (status == 0)
        printf("ok %s\n", text);
    else
        say_error(error);
}

static void say_result(int status, int slot, const sg_result *result, const sg_error *error)
{
    if (status != 0) {
        printf("slot %d ", slot);
        say_error(error);
        return;
    }

    printf("ok slot %d id %" PRIu64 " %s %s reason %d retries %d tried %" PRIu32 " late %d", slot,
           result->request_id, result->backend, result->precision, result->reason,
           result->retries, result->tried, result->late);
    for (size_t i = 0; i < result->output_count; i++) {
        const sg_output *output = &result->outputs[i];
        const float *values = output->data;
        size_t count = output->bytes / sizeof *values;

        printf(" | %s %s", sg_output_spec(session, i)->name, sg_dtype_name(output->dtype));
        for (int d = 0; d < output->rank; d++)
            printf("%c%" PRIu32, d == 0 ? ' ' : 'x', output->shape[d]);

        printf(" :");
        for (size_t v = 0; v < count && v < 16; v++)
            printf(" %g", (double)values[v]);

        /* Each byte of it is there. */
        for (size_t b = 0; b < output->bytes; b++) {
            volatile unsigned char byte = ((const unsigned char *)output->data)[b];
            (void)byte;
        }
    }

    printf("\n");
}

/* Events are kept until a command asks for them: each command has one line of answer. */
static char events[4096];

static void hear(void *context, const sg_event *event)
{
    size_t used = strlen(events);

    snprintf(events + used, sizeof events - used,
             "%s | %s %s %s %s %s share %g headroom %" PRId32 " age %" PRId64 " retry %" PRId64
             " number %" PRIu64 " epoch %" PRIu32 " at %" PRIu64,
             (const char *)context, event->kind, event->backend, event->precision, event->state,
             event->device_state, event->share, event->has_temperature ? event->headroom_mc : 0,
             event->has_temperature ? event->temperature_age_ms : -1, event->retry_after_ms,
             event->number, event->epoch, event->at_ns);
}

static void open_session(char **words, int count)
{
    sg_session_options options = {.model = words[1]};
    const char *backends[4];
    sg_shape shapes[4];
    sg_error error = {0};

    for (int i = 2; i < count; i++) {
        char *value = strchr(words[i], '=');

        *value++ = '\0';
        if (strcmp(words[i], "slots") == 0)
            options.slots = atoi(value);
        else if (strcmp(words[i], "on_busy") == 0)
            options.on_busy = value;
        else if (strcmp(words[i], "priority") == 0)
            options.priority = value;
        else if (strcmp(words[i], "strict") == 0)
            options.strict = true;
        else if (strcmp(words[i], "hedge") == 0)
            options.hedge = true;
        else if (strcmp(words[i], "events") == 0) {
            options.on_event = hear;
            options.event_context = (void *)"";
        } else if (strcmp(words[i], "capacity") == 0)
            options.output_capacity_bytes = atoll(value);
        else if (strcmp(words[i], "backend") == 0)
            backends[options.backend_count++] = value;
        else {
            sg_shape *shape = &shapes[options.shape_count++];

            *shape = (sg_shape){.input = words[i]};
            for (char *d = strtok(value, "x"); d != NULL; d = strtok(NULL, "x"))
                shape->shape[shape->rank++] = (uint32_t)atoll(d);
        }
    }

    if (options.backend_count > 0)
        options.backends = backends;

    options.shapes = shapes;
    sg_close_session(session);
    session = sg_open_session(client, &options, 15000, &error);
    if (session == NULL) {
        say_error(&error);
        return;
    }

    printf("ok slots %d epoch %" PRIu32 " stateful %d", sg_slot_count(session), sg_epoch(session),
           sg_is_stateful(session));
    for (size_t i = 0; i < sg_input_count(session); i++) {
        const sg_tensor *input = sg_input_spec(session, i);

        printf(" | %s %s", input->name, sg_dtype_name(input->dtype));
        for (int d = 0; d < input->rank; d++)
            printf("%c%" PRIu32, d == 0 ? ' ' : 'x', input->shape[d]);

        /* All of it is there, in each slot. */
        for (int slot = 0; slot < sg_slot_count(session); slot++)
            memset(sg_input(session, slot, i), 0, input->capacity_bytes);
    }

    printf("\n");
}

static void obey(char **words, int count)
{
    sg_error error = {0};
    sg_result result;
    char hash[65] = "";
    const char *verb = words[0];

    if (strcmp(verb, "connect") == 0) {
        sg_disconnect(client);
        client = sg_connect(count > 1 ? words[1] : NULL, 5000, &error);
        outcome(client != NULL ? 0 : -1, &error, "");
    } else if (strcmp(verb, "load") == 0) {
        const char *name = strcmp(words[2], "-") != 0 ? words[2] : NULL;
        int status = sg_load_model(client, words[1], name, 15000, hash, &error);

        outcome(status, &error, hash);
    } else if (strcmp(verb, "unload") == 0) {
        outcome(sg_unload_model(client, words[1], count > 2, 15000, &error), &error, "");
    } else if (strcmp(verb, "prepare") == 0) {
        sg_shape shape = {.input = words[2]};

        for (int i = 3; i < count; i++)
            shape.shape[shape.rank++] = (uint32_t)atoi(words[i]);

        outcome(sg_prepare_shapes(client, words[1], &shape, 1, 15000, &error), &error, "");
    } else if (strcmp(verb, "call") == 0) {
        char *reply = NULL;
        int limit_ms = count > 2 ? atoi(words[2]) : 15000;
        int status = sg_call(client, words[1], NULL, limit_ms, &reply, &error);

        outcome(status, &error, status == 0 ? reply : "");
        free(reply);
    } else if (strcmp(verb, "open") == 0) {
        open_session(words, count);
    } else if (strcmp(verb, "disconnect") == 0) {
        sg_disconnect(client);
        client = NULL;
        printf("ok\n");
    } else if (session == NULL) {
        printf("no session\n");
    } else if (strcmp(verb, "fill") == 0) {
        float *input = sg_input(session, atoi(words[1]), (size_t)atoi(words[2]));

        for (int i = 3; i < count; i++)
            input[i - 3] = strtof(words[i], NULL);

        printf("ok\n");
    } else if (strcmp(verb, "submit") == 0) {
        sg_request request = {.timeout_us = count > 2 ? atoll(words[2]) : 0, .reset = count > 3};

        outcome(sg_submit(session, atoi(words[1]), &request, &error), &error, "");
    } else if (strcmp(verb, "run") == 0) {
        int status = sg_run(session, atoi(words[1]), NULL, &result, &error);

        say_result(status, atoi(words[1]), &result, &error);
    } else if (strcmp(verb, "wait") == 0) {
        int status = sg_wait(session, atoi(words[1]), atoi(words[2]), &result, &error);

        say_result(status, atoi(words[1]), &result, &error);
    } else if (strcmp(verb, "any") == 0) {
        int slot, status = sg_wait_any(session, atoi(words[1]), &slot, &result, &error);

        say_result(status, slot, &result, &error);
    } else if (strcmp(verb, "take") == 0) {
        int taken = sg_take_events(session, atoi(words[1]), &error);
        char text[32];

        snprintf(text, sizeof text, "took %d", taken);
        outcome(taken < 0 ? -1 : 0, &error, text);
    } else if (strcmp(verb, "events") == 0) {
        printf("ok%s\n", events);
        events[0] = '\0';
    } else if (strcmp(verb, "cancel") == 0) {
        outcome(sg_cancel(session, atoi(words[1]), &error), &error, "");
    } else if (strcmp(verb, "epoch") == 0) {
        printf("ok %" PRIu32 "\n", sg_epoch(session));
    } else if (strcmp(verb, "close") == 0) {
        sg_close_session(session);
        session = NULL;
        printf("ok\n");
    } else {
        printf("unknown command\n");
    }
}

int main(void)
{
    char line[4096];

    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin) != NULL) {
        char *words[MAX_WORDS];
        int count = 0;

        line[strcspn(line, "\n")] = '\0';
        for (char *rest = line, *word; count < MAX_WORDS; count++) {
            word = strsep(&rest, " ");
            if (word == NULL)
                break;

            words[count] = word;
        }

        if (count > 0)
            obey(words, count);
    }

    sg_close_session(session);
    sg_disconnect(client);
    return 0;
}
