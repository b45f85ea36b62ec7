/* Runs a model once on zeros, and prints what came out and where it ran.
 *
 *     cc -std=c11 -O2 -o example example.c switchgear.c && ./example model.tflite
 */
#include "switchgear.h"

#include <stdio.h>
#include <string.h>

static int tell(const char *what, const sg_error *error)
{
    fprintf(stderr, "%s: %s (%d): %s\n", what, error->name, error->code, error->text);
    return 1;
}

static void print_shape(const char *name, sg_dtype dtype, int rank, const uint32_t *shape)
{
    printf("  %s %s [", name, sg_dtype_name(dtype));
    for (int d = 0; d < rank; d++)
        printf(d > 0 ? ", %u" : "%u", shape[d]);

    printf("]");
}

static int infer(sg_session *session)
{
    sg_result result;
    sg_error error;

    for (size_t i = 0; i < sg_input_count(session); i++) {
        const sg_tensor *input = sg_input_spec(session, i);

        print_shape(input->name, input->dtype, input->rank, input->shape);
        printf(" of zeros\n");
        memset(sg_input(session, 0, i), 0, input->capacity_bytes);
    }

    if (sg_run(session, 0, NULL, &result, &error) != 0)
        return tell("run", &error);

    printf("ran on %s (%s) in %.3f ms, %.3f ms with the way there and back\n", result.backend,
           result.precision, (double)result.run_ns / 1e6, (double)result.total_ns / 1e6);
    for (size_t i = 0; i < result.output_count; i++) {
        const sg_output *output = &result.outputs[i];

        print_shape(sg_output_spec(session, i)->name, output->dtype, output->rank,
                    output->shape);
        if (output->dtype == SG_FLOAT32 && output->bytes >= sizeof(float))
            printf(" %g ...", (double)*(const float *)output->data);

        printf("\n");
    }

    return 0;
}

int main(int argc, char **argv)
{
    char hash[65];
    sg_error error;
    sg_client *client;
    sg_session *session;
    int status;

    if (argc != 2) {
        fprintf(stderr, "usage: example MODEL.tflite\n");
        return 2;
    }

    client = sg_connect(NULL, 5000, &error);
    if (client == NULL)
        return tell("connect", &error);

    if (sg_load_model(client, argv[1], NULL, 60000, hash, &error) != 0) {
        sg_disconnect(client);
        return tell("load", &error);
    }

    session = sg_open_session(client, &(sg_session_options){.model = hash}, 10000, &error);
    sg_disconnect(client);
    if (session == NULL)
        return tell("open", &error);

    status = infer(session);
    sg_close_session(session);
    return status;
}
