// Ends a process that has lines in llama.cpp's log, in the way named by the argument.

#include "log.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

static const char * way = "";

static bool is(const char * name) {
    return strcmp(way, name) == 0;
}

// Destroyed after the handlers of atexit that main registers.
static struct late {
    ~late() {
        if (is("destructor")) {
            common_log_flush(common_log_main());
        }
        if (is("destructor") || is("paused")) {
            LOG("from a destructor\n");
        }
    }
} late;

static void exit_with_3(int) {
    exit(3);
}

// Lines of a KiB: a pipe that nobody reads takes 64 of them, and the log's thread waits with the others.
static void log_lines(int count) {
    const std::string filler(1000, '.');
    for (int i = 0; i < count; i++) {
        LOG("%s %04d\n", filler.c_str(), i);
    }
}

// A thread other than this one: the log's.
static pid_t other_thread() {
    DIR * tasks = opendir("/proc/self/task");
    while (const dirent * task = tasks ? readdir(tasks) : nullptr) {
        const pid_t id = atoi(task->d_name);
        if (id != 0 && id != getpid()) {
            return id;
        }
    }
    abort();
}

int main(int argc, char ** argv) {
    way              = argc > 1 ? argv[1] : "";
    common_log * log = common_log_main();
    signal(SIGUSR1, exit_with_3);

    if (is("return") || is("destructor")) {
        log_lines(400);
    } else if (is("file")) {
        common_log_set_file(log, argv[2]);
        log_lines(400);
    } else if (is("exit in a thread")) {
        std::thread([] {
            log_lines(400);
            exit(3);
        }).join();
    } else if (is("full queue")) {
        // as many as fit, and the log's thread is still asleep when they have all been added
        for (int i = 0; i < 300; i++) {
            for (int j = 0; j < 511; j++) {
                LOG("%d\n", j);
            }
            common_log_flush(log);
        }
    } else if (is("pause and resume")) {
        LOG("before\n");
        common_log_pause(log);
        LOG("while paused\n");
        common_log_resume(log);
        LOG("after\n");
    } else if (is("paused")) {
        LOG("before\n");
        common_log_pause(log);
        LOG("while paused\n");
    } else if (is("freed")) {
        LOG("line\n");
        common_log_free(log);
    } else if (is("signal handler")) {
        // the handler interrupts a thread that holds what the log's thread needs
        flockfile(stdout);
        log_lines(10);
        raise(SIGUSR1);
    } else if (is("signal handler in the log's thread")) {
        // The handler interrupts a write to a full pipe. Anywhere else the thread may hold malloc's lock, and no exit
        // in a handler can do without malloc.
        int    ends[2];
        pollfd writable = { STDOUT_FILENO, POLLOUT, 0 };
        signal(SIGPIPE, SIG_IGN);
        if (pipe(ends) != 0 || dup2(ends[1], STDOUT_FILENO) < 0) {
            return 2;
        }
        log_lines(400);
        while (poll(&writable, 1, 0) != 0) {
            usleep(1000);
        }
        usleep(100000);  // it copies its next lines, and stands still
        syscall(SYS_tgkill, getpid(), other_thread(), SIGUSR1);
        close(ends[0]);
        pause();
    } else if (is("child")) {
        LOG("parent\n");
        common_log_flush(log);
        const pid_t child = fork();
        if (child == 0) {
            LOG("child\n");
            exit(3);
        }
        int status = 0;
        waitpid(child, &status, 0);
        LOG("child ended with %d\n", WEXITSTATUS(status));
    } else if (is("abort")) {
        log_lines(10);
        abort();
    } else {
        return 2;
    }
    return 0;
}
