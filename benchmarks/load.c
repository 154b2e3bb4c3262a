/* A client with many streams: opens them, checks every event's number, times every event, counts.

   It also reads the CPU clock of the processes under test, at the very moments between which it counts events,
   so that the two belong together. Prints one JSON object; whether that is a success is for run.py to say. */

#include "bench.h"

#include <getopt.h>

#define READ_BYTES (256 * 1024)
#define MAX_TEXT (32 << 20)
#define MAX_PROCESSES 64

enum phase { UNBORN, CONNECTING, HEAD, SIZE, DATA, DATA_END, TRAILER, OVER };

struct conn {
    int fd;
    enum phase phase;
    bool first, done, told;
    long requests, expected, deltas, tokens, left;
    int64_t asked;
    char *text; /* of the head, then of a frame that hasn't come whole */
    size_t len, size;
};

static struct {
    int port, streams, ramp_ms, settle_ms, window_ms, deadline_s;
    long requests;
    bool hold;
    const char *path, *body;
    char headers[4096];
    pid_t processes[MAX_PROCESSES];
    int process_count;
} option = {.streams = 1, .deadline_s = 60, .requests = 1, .path = "/", .body = "{}"};

static int poll_fd, timer_fd;
static struct conn *conns;
static char *request;
static size_t request_len;
static char buffer[READ_BYTES];
static long begun, opened, over, complete, failed, events, out_of_order, incomplete, unnumbered;
static char failure[256];
static struct samples latencies, ttfbs;
static int64_t now, started, all_open, ended, left_at, window_start, window_end, window_events;
static int64_t cpu_start, cpu_open, cpu_end, cpu_window_start, cpu_window_end;
static bool in_window;

/* CPU time of a process with all its threads, in nanoseconds; what /proc/PID/stat tells in ticks of 10 ms. */
static int64_t cpu_of(pid_t process)
{
    struct timespec t;
    if (clock_gettime((clockid_t)((~(unsigned)process << 3) | 2), &t) < 0)
        return 0;
    return t.tv_sec * SECOND + t.tv_nsec;
}

static int64_t cpu(void)
{
    int64_t sum = 0;
    for (int i = 0; i < option.process_count; i++)
        sum += cpu_of(option.processes[i]);
    return sum;
}

/* --- what a stream comes to ------------------------------------------------------------------------- */

static void end(struct conn *c)
{
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
    c->phase = OVER;
    free(c->text);
    c->text = NULL;
    over++;
}

static void fail(struct conn *c, const char *why)
{
    if (c->phase == OVER)
        return;
    if (!failed++)
        snprintf(failure, sizeof failure, "%s", why);
    end(c);
}

static void ask(struct conn *c)
{
    c->phase = HEAD;
    c->len = 0;
    c->expected = c->deltas = 0;
    c->tokens = -1;
    c->first = c->done = c->told = false;
    c->asked = now_ns();
    if (write(c->fd, request, request_len) != (ssize_t)request_len)
        fail(c, "the request could not be written");
}

static void body_ended(struct conn *c)
{
    if (c->told && c->done && c->tokens == c->deltas)
        complete++;
    else
        incomplete++;
    if (--c->requests > 0)
        ask(c);
    else
        end(c);
}

/* --- events ----------------------------------------------------------------------------------------- */

static const char *find(const char *in, size_t len, const char *what)
{
    return memmem(in, len, what, strlen(what));
}

static long number_after(const char *at, const char *key)
{
    return strtol(at + strlen(key), NULL, 10);
}

static void frame(struct conn *c, const char *text, size_t len)
{
    while (len && strncmp(text, "data:", 5) != 0) { /* comments, event lines */
        const char *line = memchr(text, '\n', len);
        if (!line)
            return;
        len -= line + 1 - text;
        text = line + 1;
    }
    events++;
    if (find(text, len < 16 ? len : 16, "[DONE]")) {
        c->done = true;
        return;
    }
    const char *at = find(text, len, "\"sequence_number\":");
    if (!at) {
        unnumbered++;
    } else {
        long number = number_after(at, "\"sequence_number\":");
        if (number != c->expected)
            out_of_order++;
        c->expected = number + 1;
    }
    if (find(text, len, "response.output_text.delta")) {
        c->deltas++;
        if ((in_window || !option.window_ms) && (at = memchr(text, '@', len)))
            sample(&latencies, now - strtoll(at + 1, NULL, 10));
        if (!c->first) {
            c->first = true;
            if (c->requests == option.requests)
                opened++;
        }
    } else if (find(text, len, "\"response.completed\"")) {
        c->told = true;
        if ((at = find(text, len, "\"output_tokens\":")))
            c->tokens = number_after(at, "\"output_tokens\":");
    } else if (find(text, len, "\"response.failed\"") || find(text, len, "\"error\"")) {
        snprintf(buffer, sizeof buffer, "an error in the stream: %.*s", (int)(len < 200 ? len : 200), text);
        fail(c, buffer);
    }
}

static void append(struct conn *c, const char *data, size_t len)
{
    if (c->len + len > c->size) {
        c->size = 2 * c->size + len;
        c->text = need(realloc(c->text, c->size + 1));
    }
    memcpy(c->text + c->len, data, len);
    c->len += len;
}

static void body_text(struct conn *c, const char *data, size_t len)
{
    size_t at = 0, seen = c->len ? c->len - 1 : 0;
    append(c, data, len);
    for (const char *line; c->phase != OVER && (line = memchr(c->text + seen, '\n', c->len - seen));) {
        seen = line + 1 - c->text;
        if (seen < c->len && c->text[seen] == '\n') {
            frame(c, c->text + at, seen - at);
            at = ++seen;
        }
    }
    if (c->phase == OVER)
        return;
    c->len -= at;
    memmove(c->text, c->text + at, c->len);
    if (c->len > MAX_TEXT)
        fail(c, "a frame without an end");
}

/* --- HTTP ------------------------------------------------------------------------------------------- */

static size_t head(struct conn *c, const char *data, size_t len)
{
    size_t before = c->len;
    append(c, data, len);
    c->text[c->len] = 0;
    char *end = strstr(c->text, "\r\n\r\n");
    if (!end) {
        if (c->len > 65536)
            fail(c, "an answer's head without an end");
        return len;
    }
    size_t used = end + 4 - c->text - before;
    if (strncmp(c->text, "HTTP/1.1 200", 12) != 0) {
        snprintf(buffer, sizeof buffer, "answered %.200s", c->text);
        buffer[strcspn(buffer, "\r")] = 0;
        fail(c, buffer);
        return len;
    }
    if (!strcasestr(c->text, "transfer-encoding: chunked")) {
        fail(c, "the answer is not chunked");
        return len;
    }
    sample(&ttfbs, now - c->asked);
    c->phase = SIZE;
    c->len = c->left = 0;
    return used;
}

static void parse(struct conn *c, const char *data, size_t len)
{
    const char *stop = data + len;
    while (data < stop && c->phase != OVER) {
        if (c->phase == HEAD) {
            data += head(c, data, stop - data);
        } else if (c->phase == SIZE) {
            char digit = *data++;
            if (digit == '\n') {
                c->phase = c->left ? DATA : TRAILER;
                c->left = c->left ? c->left : 2;
            } else if (digit != '\r') {
                digit |= 0x20;
                c->left = 16 * c->left + (digit >= 'a' ? digit - 'a' + 10 : digit & 15);
            }
        } else if (c->phase == DATA) {
            size_t part = stop - data < c->left ? stop - data : c->left;
            body_text(c, data, part);
            data += part;
            if (c->phase == DATA && !(c->left -= part))
                c->phase = DATA_END;
        } else if (c->phase == DATA_END) {
            if (*data++ == '\n')
                c->phase = SIZE;
        } else { /* the empty line behind the last chunk; nobody here sends trailers */
            data++;
            if (!--c->left) {
                body_ended(c);
                return;
            }
        }
    }
}

static void receive(struct conn *c)
{
    static char input[READ_BYTES];
    while (c->phase != OVER) {
        ssize_t n = read(c->fd, input, sizeof input);
        if (n < 0 && errno == EAGAIN)
            return;
        if (n < 0)
            return fail(c, strerror(errno));
        if (n == 0)
            return fail(c, "the connection was closed before the end");
        now = now_ns();
        parse(c, input, n);
        if (n < (ssize_t)sizeof input)
            return;
    }
}

/* --- opening, leaving ------------------------------------------------------------------------------- */

static void open_one(struct conn *c)
{
    struct sockaddr_in address = loopback(option.port);
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0)
        return fail(c, "no socket");
    no_delay(c->fd);
    c->requests = option.requests;
    c->phase = CONNECTING;
    if (connect(c->fd, (void *)&address, sizeof address) < 0 && errno != EINPROGRESS)
        return fail(c, strerror(errno));
    watch(poll_fd, c->fd, EPOLL_CTL_ADD, EPOLLOUT, c);
}

static void connected(struct conn *c)
{
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error)
        return fail(c, strerror(error));
    watch(poll_fd, c->fd, EPOLL_CTL_MOD, EPOLLIN, c);
    ask(c);
}

static void leave(void)
{
    left_at = now_ns();
    for (int i = 0; i < option.streams; i++)
        if (conns[i].phase != OVER)
            end(&conns[i]);
}

/* What is due by now; when to look again. */
static int64_t clockwork(void)
{
    now = now_ns();
    int64_t ramp = option.ramp_ms * (SECOND / 1000), due = started + option.deadline_s * SECOND;
    while (begun < option.streams && started + ramp * begun / option.streams <= now)
        open_one(&conns[begun++]);
    if (begun < option.streams)
        due = started + ramp * begun / option.streams;
    if (!all_open && opened == option.streams) {
        all_open = now;
        cpu_open = cpu();
        if (option.hold) {
            printf("open\n");
            fflush(stdout);
        }
    }
    if (all_open && option.window_ms && !window_end) {
        int64_t from = all_open + option.settle_ms * (SECOND / 1000);
        int64_t to = window_start + option.window_ms * (SECOND / 1000);
        if (!in_window && now >= from) {
            in_window = true;
            window_start = now;
            window_events = -events;
            cpu_window_start = cpu();
        } else if (in_window && now >= to) {
            in_window = false;
            window_end = now;
            window_events += events;
            cpu_window_end = cpu();
        }
        if (!window_end)
            due = in_window ? window_start + option.window_ms * (SECOND / 1000) : from;
    }
    return due;
}

/* --- the whole -------------------------------------------------------------------------------------- */

static void report(void)
{
    char text[4096];
    size_t n = 0;
#define NUMBER(name, value) \
    n += snprintf(text + n, sizeof text - n, "%s\"%s\":%lld", n ? "," : "{", name, (long long)(value))
    NUMBER("streams", option.streams);
    NUMBER("opened", opened);
    NUMBER("complete", complete);
    NUMBER("incomplete", incomplete);
    NUMBER("failed", failed);
    NUMBER("out_of_order", out_of_order);
    NUMBER("unnumbered", unnumbered);
    NUMBER("events", events);
    NUMBER("whole_ns", ended - started);
    NUMBER("whole_cpu_ns", cpu_end - cpu_start);
    NUMBER("open_ns", all_open ? all_open - started : 0);
    NUMBER("open_cpu_ns", all_open ? cpu_open - cpu_start : 0);
    NUMBER("window_ns", window_end ? window_end - window_start : 0);
    NUMBER("window_cpu_ns", window_end ? cpu_window_end - cpu_window_start : 0);
    NUMBER("window_events", window_end ? window_events : 0);
    NUMBER("left_at", left_at);
    n += summary(text + n, sizeof text - n, "latency", &latencies);
    n += summary(text + n, sizeof text - n, "ttfb", &ttfbs);
    for (char *c = failure; *c; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ')
            *c = '\'';
    printf("%s,\"failure\":\"%s\"}\n", text, failure);
}

static void read_options(int argc, char **argv)
{
    static const struct option known[] = {
        {"port", 1, NULL, 'p'},   {"path", 1, NULL, 'u'},   {"body", 1, NULL, 'b'},
        {"header", 1, NULL, 'h'}, {"streams", 1, NULL, 'n'}, {"requests", 1, NULL, 'r'},
        {"ramp", 1, NULL, 'm'},   {"settle", 1, NULL, 's'}, {"window", 1, NULL, 'w'},
        {"deadline", 1, NULL, 'd'}, {"process", 1, NULL, 'c'}, {"hold", 0, NULL, 'o'}, {0}};
    for (int got; (got = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        int number = optarg ? atoi(optarg) : 0;
        size_t at = strlen(option.headers);
        switch (got) {
        case 'p': option.port = number; break;
        case 'u': option.path = optarg; break;
        case 'b': option.body = optarg; break;
        case 'h': snprintf(option.headers + at, sizeof option.headers - at, "%s\r\n", optarg); break;
        case 'n': option.streams = number; break;
        case 'r': option.requests = number; break;
        case 'm': option.ramp_ms = number; break;
        case 's': option.settle_ms = number; break;
        case 'w': option.window_ms = number; break;
        case 'd': option.deadline_s = number; break;
        case 'o': option.hold = true; break;
        case 'c':
            if (option.process_count < MAX_PROCESSES)
                option.processes[option.process_count++] = number;
            break;
        default: exit(2);
        }
    }
    if (option.streams < 1 || option.streams >= MAX_CONNECTIONS || option.requests < 1)
        exit(2);
}

int main(int argc, char **argv)
{
    read_options(argc, argv);
    bounded(option.deadline_s + 10);
    size_t room = strlen(option.body) + strlen(option.path) + sizeof option.headers + 256;
    request = need(malloc(room));
    request_len = snprintf(request, room,
                           "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
                           "Accept: text/event-stream\r\nContent-Length: %zu\r\n%s\r\n%s",
                           option.path, option.port, strlen(option.body), option.headers, option.body);
    conns = need(calloc(option.streams, sizeof *conns));
    for (int i = 0; i < option.streams; i++)
        conns[i].fd = -1;
    poll_fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    watch(poll_fd, timer_fd, EPOLL_CTL_ADD, EPOLLIN, &timer_fd);
    if (option.hold)
        watch(poll_fd, STDIN_FILENO, EPOLL_CTL_ADD, EPOLLIN, &option);
    cpu_start = cpu();
    started = now_ns();
    while (over < option.streams) {
        wake_at(timer_fd, clockwork());
        if (now >= started + option.deadline_s * SECOND) {
            snprintf(failure, sizeof failure, "not at its end after %d s", option.deadline_s);
            failed += option.streams - over;
            break;
        }
        struct epoll_event ready[256];
        int n = epoll_wait(poll_fd, ready, 256, -1);
        if (n < 0 && errno != EINTR)
            die("epoll_wait");
        for (int i = 0; i < n; i++) {
            struct conn *c = ready[i].data.ptr;
            if ((void *)c == &timer_fd)
                expired(timer_fd);
            else if ((void *)c == &option)
                leave();
            else if (c->phase == CONNECTING)
                connected(c);
            else if (c->phase != OVER)
                receive(c);
        }
    }
    ended = now_ns();
    cpu_end = cpu();
    report();
    return 0;
}
