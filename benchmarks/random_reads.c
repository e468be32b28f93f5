/* Random 4 KiB O_DIRECT reads from a number of threads; prints reads per second. What the device allows.
 * usage: random_reads SECONDS THREADS FILE... */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { kBlock = 4096 };

static int* files;
static uint64_t* ends; /* running sum of blocks: picks a file in proportion to its size */
static int num_files;
static double deadline;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void* work(void* argument) {
  uint64_t state = 0x9E3779B97F4A7C15u * ((uint64_t)(uintptr_t)argument + 1), count = 0;
  void* buffer = NULL;
  if (posix_memalign(&buffer, kBlock, kBlock)) return NULL;
  while (now() < deadline) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    uint64_t block = state % ends[num_files - 1];
    int i = 0;
    while (block >= ends[i]) ++i;
    if (i) block -= ends[i - 1];
    if (pread(files[i], buffer, kBlock, (off_t)(block * kBlock)) != kBlock) {
      perror("pread");
      exit(1);
    }
    ++count;
  }
  free(buffer);
  return (void*)(uintptr_t)count;
}

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const int threads = atoi(argv[2]);
  num_files = argc - 3;
  files = calloc((size_t)num_files, sizeof *files);
  ends = calloc((size_t)num_files, sizeof *ends);
  for (int i = 0; i < num_files; ++i) {
    struct stat s;
    files[i] = open(argv[3 + i], O_RDONLY | O_DIRECT);
    if (files[i] < 0 || fstat(files[i], &s)) {
      perror(argv[3 + i]);
      return 1;
    }
    ends[i] = (i ? ends[i - 1] : 0) + (uint64_t)s.st_size / kBlock;
  }
  if (ends[num_files - 1] == 0) {
    fprintf(stderr, "nothing to read\n");
    return 1;
  }
  pthread_t* ids = calloc((size_t)threads, sizeof *ids);
  const double start = now();
  deadline = start + atof(argv[1]);
  for (int i = 0; i < threads; ++i) pthread_create(&ids[i], NULL, work, (void*)(uintptr_t)i);
  uint64_t total = 0;
  for (int i = 0; i < threads; ++i) {
    void* count;
    pthread_join(ids[i], &count);
    total += (uint64_t)(uintptr_t)count;
  }
  printf("%.0f\n", (double)total / (now() - start));
  return 0;
}
