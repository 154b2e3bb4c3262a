/* A supervisor made of nothing but load: answers POSTs with events at a set rate, and counts.

   What it plays is named by a part of the path, or by a string in the body, such as its "user":

     paced-RATE-EVENTS       EVENTS deltas at RATE a second, each in a write of its own
     burst-MS                as many as the socket takes, for MS milliseconds, many to a write
     idle-SECONDS            one delta, then silence
     later-RATE-EVENTS       as paced, but in the second cycle
     cycles-K-M-RATE-SPLIT   M cycles of K deltas (RATE 0: at once); the follow-up is timed. SPLIT 1: the body
                             ends a millisecond after its [DONE], as it does with many servers

   Every cycle begins with an opening and an item's beginning and ends with that item; the last one says in
   its usage how many deltas there were, so that the client can tell whether it got all of them.

   GET /stats: what was counted. An abandoned stream is one whose connection closed before its end. */

#include "bench.h"

#define MAX_HEAD 65536
#define MAX_BODY (16 << 20)
#define EVENT_BYTES 512
#define BATCH 64 /* events in one write of a burst */
#define LATE (5 * SECOND / 1000)
#define SPLIT_WAIT (SECOND / 1000)

enum play { PACED, BURST, IDLE, LATER, CYCLES };

struct task { /* what outlives one cycle */
    long cycle, deltas;
    int64_t asked; /* when the last byte of the newest cycle was about to be written */
};

struct conn {
    int fd;
    bool streaming, ending, split;
    enum play play;
    long rate, left, cycles, id;
    int64_t interval, due, until;
    int heap; /* place in the heap, -1 for none */
    long number;
    char *in, *out;
    size_t in_len, in_size, out_len, out_at, out_size;
};

static int poll_fd, timer_fd;
static struct conn *heap[MAX_CONNECTIONS];
static int heap_len;
static struct task *tasks;
static long task_count, task_size;
static long connections, streams, opened, completed, abandoned, sent, late, stalled, wrong;
static int64_t first_abandoned, last_abandoned;
static struct samples seams;

/* --- who is due next -------------------------------------------------------------------------------- */

static void put(struct conn *c, int at)
{
    heap[at] = c;
    c->heap = at;
}

static void sift(struct conn *c, int at)
{
    for (int up; at > 0 && heap[up = (at - 1) / 2]->due > c->due; at = up)
        put(heap[up], at);
    for (int down; (down = 2 * at + 1) < heap_len; at = down) {
        if (down + 1 < heap_len && heap[down + 1]->due < heap[down]->due)
            down++;
        if (heap[down]->due >= c->due)
            break;
        put(heap[down], at);
    }
    put(c, at);
}

static void schedule(struct conn *c, int64_t due)
{
    c->due = due;
    sift(c, c->heap < 0 ? heap_len++ : c->heap);
}

static void unschedule(struct conn *c)
{
    int at = c->heap;
    if (at < 0)
        return;
    c->heap = -1;
    struct conn *last = heap[--heap_len];
    if (last != c)
        sift(last, at);
}

/* --- writing ---------------------------------------------------------------------------------------- */

static void drop(struct conn *c)
{
    if (c->streaming) {
        streams--;
        abandoned++;
        last_abandoned = now_ns();
        if (!first_abandoned)
            first_abandoned = last_abandoned;
    }
    unschedule(c);
    close(c->fd);
    connections--;
    free(c->in);
    free(c->out);
    free(c);
}

static char *room(struct conn *c, size_t more)
{
    if (c->out_len + more > c->out_size) {
        c->out_size = 2 * c->out_size + more;
        c->out = need(realloc(c->out, c->out_size));
    }
    return c->out + c->out_len;
}

/* One event in one HTTP chunk. */
static void chunk(struct conn *c, const char *data, size_t len)
{
    char *at = room(c, len + 16);
    int head = sprintf(at, "%zx\r\n", len);
    memcpy(at + head, data, len);
    memcpy(at + head + len, "\r\n", 2);
    c->out_len += head + len + 2;
}

#define EVENT(c, ...)                                                \
    do {                                                             \
        char text_[EVENT_BYTES];                                     \
        int len_ = snprintf(text_, sizeof text_, "data: " __VA_ARGS__); \
        chunk(c, text_, len_);                                       \
    } while (0)

static void delta(struct conn *c)
{
    EVENT(c,
          "{\"type\":\"response.output_text.delta\",\"item_id\":\"msg_%08lx_%04ld\",\"output_index\":0,"
          "\"content_index\":0,\"delta\":\"@%020lld the usual few words of a longer text\",\"sequence_number\":%ld}\n\n",
          c->id, tasks[c->id].cycle, (long long)now_ns(), c->number);
    c->number++;
    tasks[c->id].deltas++;
    sent++;
}

/* Write what there is; false if the connection is gone (and freed). */
static bool flush(struct conn *c)
{
    while (c->out_at < c->out_len) {
        ssize_t n = write(c->fd, c->out + c->out_at, c->out_len - c->out_at);
        if (n < 0 && errno == EAGAIN) {
            watch(poll_fd, c->fd, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT | EPOLLRDHUP, c);
            stalled++;
            return true;
        }
        if (n < 0) {
            drop(c);
            return false;
        }
        c->out_at += n;
    }
    c->out_at = c->out_len = 0;
    return true;
}

static void begin_cycle(struct conn *c)
{
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                               "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n";
    long cycle = tasks[c->id].cycle;
    memcpy(room(c, sizeof head), head, sizeof head - 1);
    c->out_len += sizeof head - 1;
    EVENT(c,
          "{\"type\":\"response.created\",\"response\":{\"id\":\"resp_%08lx_%04ld\",\"object\":\"response\","
          "\"created_at\":1764000000,\"status\":\"in_progress\",\"output\":[]},\"sequence_number\":0}\n\n",
          c->id, cycle);
    EVENT(c,
          "{\"type\":\"response.output_item.added\",\"output_index\":0,\"item\":{\"id\":\"msg_%08lx_%04ld\","
          "\"type\":\"message\",\"role\":\"assistant\",\"status\":\"in_progress\",\"content\":[]},"
          "\"sequence_number\":1}\n\n",
          c->id, cycle);
    c->number = 2;
    c->streaming = true;
    streams++;
}

static void finish(struct conn *c)
{
    c->streaming = c->ending = false;
    streams--;
    memcpy(room(c, 8), "0\r\n\r\n", 5);
    c->out_len += 5;
}

static void end_cycle(struct conn *c)
{
    struct task *task = &tasks[c->id];
    bool last = task->cycle >= c->cycles;
    EVENT(c,
          "{\"type\":\"response.output_item.done\",\"output_index\":0,\"item\":{\"id\":\"msg_%08lx_%04ld\","
          "\"type\":\"message\",\"role\":\"assistant\",\"status\":\"completed\",\"content\":[{\"type\":"
          "\"output_text\",\"text\":\"The usual few words.\",\"annotations\":[]}]},\"sequence_number\":%ld}\n\n",
          c->id, task->cycle, c->number++);
    if (last) {
        EVENT(c,
              "{\"type\":\"response.completed\",\"response\":{\"id\":\"resp_%08lx_%04ld\",\"object\":"
              "\"response\",\"created_at\":1764000000,\"status\":\"completed\",\"output\":[],\"usage\":"
              "{\"input_tokens\":10,\"output_tokens\":%ld,\"total_tokens\":%ld}},\"sequence_number\":%ld}\n\n",
              c->id, task->cycle, task->deltas, task->deltas + 10, c->number);
        completed++;
    } else {
        EVENT(c,
              "{\"type\":\"response.output_item.done\",\"item\":{\"type\":\"task_continue_request\","
              "\"id\":\"continue_%08lx_%04ld\",\"step\":%ld},\"sequence_number\":%ld}\n\n",
              c->id, task->cycle, task->cycle, c->number);
    }
    EVENT(c, "[DONE]\n\n");
    unschedule(c);
    task->asked = now_ns();
    if (c->split && !last) {
        c->ending = true;
        schedule(c, task->asked + SPLIT_WAIT);
    } else {
        finish(c);
    }
}

/* This stream's moment has come; false if the connection is gone. */
static bool play(struct conn *c, int64_t now)
{
    if (c->ending) {
        unschedule(c);
        finish(c);
        return flush(c);
    }
    if (c->out_len) { /* the proxy doesn't read: try again when it has */
        schedule(c, now + c->interval);
        return true;
    }
    if (c->due < now - LATE)
        late++;
    if (c->play == IDLE || c->left <= 0) {
        end_cycle(c);
        return flush(c);
    }
    delta(c);
    c->left--;
    /* Never two events at once to make up for a delay: that would be another load than the one asked for. */
    schedule(c, c->due + c->interval > now ? c->due + c->interval : now + c->interval);
    return flush(c);
}

static bool burst(struct conn *c)
{
    if (now_ns() >= c->until) {
        end_cycle(c);
        return flush(c);
    }
    for (int i = 0; i < BATCH; i++)
        delta(c);
    return flush(c);
}

/* --- requests --------------------------------------------------------------------------------------- */

static long new_task(void)
{
    if (task_count == task_size) {
        task_size = task_size ? 2 * task_size : 1024;
        tasks = need(realloc(tasks, task_size * sizeof *tasks));
    }
    tasks[task_count] = (struct task){.cycle = 1};
    return task_count++;
}

static bool answer(struct conn *c, int status, const char *body)
{
    size_t len = strlen(body);
    char *at = room(c, len + 256);
    c->out_len += sprintf(at, "HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                          status, len, body);
    return flush(c);
}

static bool stats(struct conn *c)
{
    char text[2048];
    size_t n = snprintf(text, sizeof text,
                        "{\"connections\":%ld,\"streams\":%ld,\"opened\":%ld,\"completed\":%ld,\"sent\":%ld,"
                        "\"late\":%ld,\"stalled\":%ld,\"wrong_follow_ups\":%ld,\"abandoned\":%ld,"
                        "\"first_abandoned_at\":%lld,\"last_abandoned_at\":%lld",
                        connections - 1, streams, opened, completed, sent, late, stalled, wrong, abandoned,
                        (long long)first_abandoned, (long long)last_abandoned);
    n += summary(text + n, sizeof text - n, "seam", &seams);
    snprintf(text + n, sizeof text - n, "}");
    return answer(c, 200, text);
}

/* The task that a follow-up goes on with, or a new one; -1 for an answer to what nobody asks. */
static long task_of(const char *body)
{
    static const char key[] = "\"continue_request_id\"";
    const char *found = NULL;
    for (const char *at = body; (at = strstr(at, key)); at++)
        found = at;
    if (!found)
        return new_task();
    unsigned long id;
    long cycle;
    found = strstr(found, "continue_0");
    if (!found || sscanf(found, "continue_%lx_%ld", &id, &cycle) != 2 || id >= (unsigned long)task_count ||
        tasks[id].cycle != cycle)
        return -1;
    sample(&seams, now_ns() - tasks[id].asked);
    tasks[id].cycle++;
    return (long)id;
}

static bool start(struct conn *c, const char *head, const char *body)
{
    static unsigned long long random = 88172645463325252ULL;
    static const char *const places[] = {"/paced-", "/burst-", "/idle-", "/later-", "/cycles-"};
    static const char *const strings[] = {"\"paced-", "\"burst-", "\"idle-", "\"later-", "\"cycles-"};
    const char *found = NULL;
    long a = 0, b = 0, rate = 0, split = 0;
    int kind;
    for (kind = PACED; kind <= CYCLES; kind++)
        if ((found = strstr(head, places[kind])) || (found = strstr(body, strings[kind])))
            break;
    if (!found)
        return answer(c, 404, "{\"error\":{\"message\":\"no such play\"}}");
    sscanf(strchr(found, '-'), "-%ld-%ld-%ld-%ld", &a, &b, &rate, &split);
    if ((c->id = task_of(body)) < 0) {
        wrong++;
        return answer(c, 400, "{\"error\":{\"message\":\"nothing asks for this answer\"}}");
    }
    int64_t now = now_ns();
    long cycle = tasks[c->id].cycle;
    c->play = kind;
    c->cycles = kind == CYCLES ? b : kind == LATER ? 2 : 1;
    c->split = split;
    opened++;
    begin_cycle(c);
    if (kind == BURST) {
        c->until = now + a * SECOND / 1000;
        watch(poll_fd, c->fd, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT | EPOLLRDHUP, c);
        return burst(c);
    }
    if (kind == IDLE) {
        delta(c);
        schedule(c, now + a * SECOND);
        return flush(c);
    }
    if (kind == CYCLES && !rate) {
        for (long i = 0; i < a; i++)
            delta(c);
        end_cycle(c);
        return flush(c);
    }
    if (kind == LATER && cycle == 1) {
        delta(c);
        end_cycle(c);
        return flush(c);
    }
    c->left = kind == CYCLES ? a : b;
    c->interval = SECOND / (kind == CYCLES ? rate : a ? a : 1);
    /* Streams out of step with each other, or a proxy could take many at a time. */
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    schedule(c, now + (int64_t)(random % (unsigned long long)c->interval));
    return flush(c);
}

/* A whole request has come, or some more of one; false if the connection is gone. */
static bool take(struct conn *c)
{
    c->in[c->in_len] = 0;
    char *end = strstr(c->in, "\r\n\r\n");
    if (!end)
        return c->in_len < MAX_HEAD || (drop(c), false);
    char *body = end + 4;
    end[2] = 0;
    char *field = strcasestr(c->in, "\ncontent-length:");
    size_t length = field ? strtoul(field + 16, NULL, 10) : 0;
    end[2] = '\r';
    size_t whole = (body - c->in) + length;
    if (length > MAX_BODY || strncmp(c->in, "GET /stats ", 11) == 0)
        return length > MAX_BODY ? (drop(c), false) : (c->in_len = 0, stats(c));
    if (c->in_len < whole)
        return true;
    c->in_len = 0;
    end[2] = 0;
    return start(c, c->in, body);
}

static bool receive(struct conn *c)
{
    for (;;) {
        if (c->in_size - c->in_len < 4096) {
            c->in_size = 2 * c->in_size + 8192;
            c->in = need(realloc(c->in, c->in_size + 1));
        }
        ssize_t n = read(c->fd, c->in + c->in_len, c->in_size - c->in_len);
        if (n < 0 && errno == EAGAIN)
            return true;
        if (n <= 0) {
            drop(c);
            return false;
        }
        c->in_len += n;
        if (c->streaming)
            c->in_len = 0; /* nobody pipelines */
        else if (!take(c))
            return false;
    }
}

static void handle(struct conn *c, uint32_t events)
{
    if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR) && !receive(c))
        return;
    if (events & EPOLLOUT) {
        if (!flush(c) || c->out_len)
            return;
        if (c->streaming && c->play == BURST)
            burst(c);
        else
            watch(poll_fd, c->fd, EPOLL_CTL_MOD, EPOLLIN | EPOLLRDHUP, c);
    }
}

static void accept_all(int listener)
{
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        if (connections >= MAX_CONNECTIONS - 1) {
            close(fd);
            continue;
        }
        struct conn *c = need(calloc(1, sizeof *c));
        no_delay(fd);
        c->fd = fd;
        c->heap = -1;
        connections++;
        watch(poll_fd, fd, EPOLL_CTL_ADD, EPOLLIN | EPOLLRDHUP, c);
    }
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return fprintf(stderr, "usage: upstream SECONDS   (prints its port, ends by itself)\n"), 2;
    bounded(atoi(argv[1]));
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    if (bind(listener, (void *)&address, size) < 0 || listen(listener, 4096) < 0 ||
        getsockname(listener, (void *)&address, &size) < 0)
        die("listen");
    poll_fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    watch(poll_fd, listener, EPOLL_CTL_ADD, EPOLLIN, &listener);
    watch(poll_fd, timer_fd, EPOLL_CTL_ADD, EPOLLIN, &timer_fd);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        struct epoll_event events[256];
        int n = epoll_wait(poll_fd, events, 256, -1);
        if (n < 0 && errno != EINTR)
            die("epoll_wait");
        for (int i = 0; i < n; i++) {
            if (events[i].data.ptr == &listener)
                accept_all(listener);
            else if (events[i].data.ptr == &timer_fd)
                expired(timer_fd);
            else
                handle(events[i].data.ptr, events[i].events);
        }
        int64_t now = now_ns();
        while (heap_len && heap[0]->due <= now)
            play(heap[0], now);
        if (heap_len)
            wake_at(timer_fd, heap[0]->due);
    }
}
