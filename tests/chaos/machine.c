/* The clock and the disk of a process, which a run changes while the process runs (machine.py).
 *
 * LD_PRELOAD loads this library before libc, so its functions replace those of libc. CHAOS_MACHINE
 * names a file of two int64: how far the clock is ahead, and how long each write to a file takes,
 * both in microseconds. Monotonic clocks stay as they are, as with a step by NTP.
 */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t still[2];
static const volatile int64_t *machine = still;

__attribute__((constructor)) static void map_machine(void) {
  const char *path = getenv("CHAOS_MACHINE");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *mapped = mmap(NULL, sizeof still, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (mapped != MAP_FAILED) machine = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += machine[0] / 1000000; /* all steps are whole seconds */
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *seconds) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (seconds) *seconds = exact.tv_sec;
  return exact.tv_sec;
}

ssize_t write(int file, const void *data, size_t bytes) {
  struct stat found;
  int64_t late_us = machine[1];
  if (late_us > 0 && !fstat(file, &found) && S_ISREG(found.st_mode)) {
    struct timespec pause = {late_us / 1000000, late_us % 1000000 * 1000};
    nanosleep(&pause, NULL);
  }
  return syscall(SYS_write, file, data, bytes);
}
