/* A clock that is AHEAD seconds ahead, for all programs of a host that load this (/etc/ld.so.preload).

   What tells the time of day does it by that clock, and what waits until a time of day takes it as one of that clock.
   The kernel knows nothing of it: times of files, and clocks that count since the boot, are right. */

#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += AHEAD;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec found;
    if (clock_gettime(CLOCK_REALTIME, &found))
        return -1;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec found;
    clock_gettime(CLOCK_REALTIME_COARSE, &found);
    if (now)
        *now = found.tv_sec;
    return found.tv_sec;
}

static struct timespec kernels(const struct timespec *until)
{
    struct timespec right = *until;
    right.tv_sec -= AHEAD;
    return right;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until)
{
    if (until->tv_sec < 1000000000) /* a condition can have the clock that counts since the boot */
        return pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, until);
    struct timespec right = kernels(until);
    return pthread_cond_clockwait(condition, mutex, CLOCK_REALTIME, &right);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until)
{
    struct timespec right = kernels(until);
    return pthread_mutex_clocklock(mutex, CLOCK_REALTIME, &right);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until)
{
    struct timespec right = kernels(until);
    return sem_clockwait(semaphore, CLOCK_REALTIME, &right);
}
