/* What the upstream and the load client share. Linux only: epoll, timerfd, and clocks of other processes. */
#ifndef BENCH_H
#define BENCH_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define MAX_CONNECTIONS 16384
#define MAX_SAMPLES 4000000
#define STAMP_DIGITS 20

static inline int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

static inline void die(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, errno ? strerror(errno) : "failed");
    exit(1);
}

static inline void *need(void *memory)
{
    if (!memory)
        die("memory");
    return memory;
}

/* End by itself, whatever happens to whoever started it. */
static inline void bounded(int seconds)
{
    struct rlimit files;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(seconds);
    signal(SIGPIPE, SIG_IGN);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
}

static inline struct sockaddr_in loopback(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static inline void no_delay(int fd)
{
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static inline void watch(int poll, int fd, int how, uint32_t events, void *what)
{
    struct epoll_event event = {.events = events, .data.ptr = what};
    if (epoll_ctl(poll, how, fd, &event) < 0)
        die("epoll_ctl");
}

/* A timer with nanoseconds: epoll's own time-out would put all events of one millisecond into one batch. */
static inline void wake_at(int timer, int64_t due)
{
    struct itimerspec when = {.it_value = {due / SECOND, due % SECOND}};
    if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL) < 0)
        die("timerfd_settime");
}

static inline void expired(int timer)
{
    uint64_t count;
    if (read(timer, &count, sizeof count) < 0 && errno != EAGAIN)
        die("timerfd");
}

struct samples {
    int64_t *values;
    size_t count, size;
};

static inline void sample(struct samples *all, int64_t value)
{
    if (all->count == MAX_SAMPLES)
        return;
    if (all->count == all->size) {
        all->size = all->size ? 2 * all->size : 4096;
        all->values = need(realloc(all->values, all->size * sizeof *all->values));
    }
    all->values[all->count++] = value;
}

static inline int by_value(const void *one, const void *other)
{
    int64_t a = *(const int64_t *)one, b = *(const int64_t *)other;
    return (a > b) - (a < b);
}

/* ,"name":{"count":…,"min":…,"p50":…,"p90":…,"p99":…,"max":…} in nanoseconds */
static inline size_t summary(char *out, size_t room, const char *name, struct samples *all)
{
    size_t n = all->count;
    if (!n)
        return snprintf(out, room, ",\"%s\":null", name);
    qsort(all->values, n, sizeof *all->values, by_value);
    int64_t *v = all->values;
    return snprintf(out, room,
                    ",\"%s\":{\"count\":%zu,\"min\":%lld,\"p50\":%lld,\"p90\":%lld,\"p99\":%lld,\"max\":%lld}",
                    name, n, (long long)v[0], (long long)v[n / 2], (long long)v[n * 9 / 10],
                    (long long)v[n * 99 / 100], (long long)v[n - 1]);
}

#endif
