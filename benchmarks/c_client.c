/* Times sg_run() of a tiny model: `c_client SOCKET MODEL`.  For each number on stdin it makes so
 * many calls, and prints their median in nanoseconds. */
#define _GNU_SOURCE
#include "switchgear.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int by_size(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;

    return (a > b) - (a < b);
}

int main(int argc, char **argv)
{
    sg_error error;
    sg_client *client = argc == 3 ? sg_connect(argv[1], 5000, &error) : NULL;
    sg_session *session = NULL;
    size_t count;

    if (client != NULL)
        session = sg_open_session(client, &(sg_session_options){.model = argv[2]}, 5000, &error);

    if (session == NULL) {
        fprintf(stderr, "c_client: %s\n", argc == 3 ? error.text : "SOCKET MODEL");
        return 1;
    }

    setvbuf(stdout, NULL, _IOLBF, 0);
    while (scanf("%zu", &count) == 1 && count > 0) {
        int64_t *times = calloc(count, sizeof *times);

        if (times == NULL)
            return 1;

        for (size_t i = 0; i < count; i++) {
            sg_result result;
            int64_t begin = now_ns();

            if (sg_run(session, 0, NULL, &result, &error) != 0) {
                fprintf(stderr, "c_client: %s\n", error.text);
                return 1;
            }

            times[i] = now_ns() - begin;
        }

        qsort(times, count, sizeof *times, by_size);
        printf("%lld\n", (long long)times[count / 2]);
        free(times);
    }

    sg_close_session(session);
    sg_disconnect(client);
    return 0;
}
