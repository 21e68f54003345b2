// The wall clock of one process, which a test steps; its monotonic clocks stay as they are, as when a machine's clock
// is set. To be preloaded. CTRLMESH_TEST_CLOCK names a file with the seconds by which it is wrong, as an int64_t.
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *wrong_by;

__attribute__((constructor)) static void open_clock(void)
{
	const char *file = getenv("CTRLMESH_TEST_CLOCK");
	int descriptor = file ? open(file, O_RDONLY | O_CLOEXEC) : -1;
	if (descriptor < 0)
		return;
	void *shared = mmap(NULL, sizeof *wrong_by, PROT_READ, MAP_SHARED, descriptor, 0);
	close(descriptor);
	if (shared != MAP_FAILED)
		wrong_by = shared;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
	int failed = syscall(SYS_clock_gettime, clock, now);
	if (!failed && wrong_by && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
		now->tv_sec += *wrong_by;
	return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	int failed = syscall(SYS_gettimeofday, now, zone);
	if (!failed && wrong_by)
		now->tv_sec += *wrong_by;
	return failed;
}

time_t time(time_t *also)
{
	struct timespec now;
	if (clock_gettime(CLOCK_REALTIME, &now))
		return (time_t)-1;
	if (also)
		*also = now.tv_sec;
	return now.tv_sec;
}
