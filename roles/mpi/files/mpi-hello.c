/* Checks that MPI computes correctly over the fabric and measures the rate from each node to the next.

     mpi-hello                      sums the rank numbers and a large vector over all processes
     mpi-hello MS LOW HIGH TRIES    also sends from each rank to the next for MS milliseconds. Pairs without a common
                                    rank run at the same time. A pair whose payload rate in Gbit/s is not in
                                    LOW..HIGH is measured again, at most TRIES times and two pairs at a time: other
                                    work on the machine can make one measurement too low.

   Prints one JSON object. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { CHUNK = 128 * 1024, WINDOW = 4, COUNT = 1000000, DATA = 1, LAST = 2 };

static void send_for(double seconds, int to, char *buffer) {
  MPI_Request requests[WINDOW];
  for (int i = 0; i < WINDOW; i++) requests[i] = MPI_REQUEST_NULL;
  const double end = MPI_Wtime() + seconds;
  for (int i = 0; MPI_Wtime() < end; i = (i + 1) % WINDOW) {
    MPI_Wait(&requests[i], MPI_STATUS_IGNORE);
    MPI_Isend(buffer, CHUNK, MPI_CHAR, to, DATA, MPI_COMM_WORLD, &requests[i]);
  }
  MPI_Waitall(WINDOW, requests, MPI_STATUSES_IGNORE);
  MPI_Send(buffer, 0, MPI_CHAR, to, LAST, MPI_COMM_WORLD);
}

/* Payload rate in Gbit/s. The first messages do not count: the token bucket that limits the rate starts full. */
static double receive(int from, char *buffer) {
  double first = 0, last = 0;
  long bytes = 0;
  for (int i = 0;; i++) {
    MPI_Status status;
    MPI_Recv(buffer, CHUNK, MPI_CHAR, from, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
    if (status.MPI_TAG == LAST) break;
    last = MPI_Wtime();
    if (i < WINDOW) first = last;
    else bytes += CHUNK;
  }
  return last > first ? 8e-9 * bytes / (last - first) : 0;
}

static void measure(int rank, int size, int at_once, const char *wanted, double seconds, double *rates) {
  char *out = calloc(1, CHUNK), *in = malloc(CHUNK);
  int rounds = size < 2 * at_once ? size : (size + at_once - 1) / at_once;
  /* Pairs of one round have no rank in common; the last pair ends at the rank where the first begins. */
  while (size > 2 && (size - 1) % rounds == 0) rounds++;
  for (int round = 0; round < rounds; round++) {
    double mine = 0;
    int idle = 1, any = 0;
    for (int pair = round; pair < size; pair += rounds) any |= wanted[pair];
    if (!any) continue;
    MPI_Barrier(MPI_COMM_WORLD);
    for (int pair = round; pair < size; pair += rounds) {
      if (!wanted[pair]) continue;
      if (pair == rank || (pair + 1) % size == rank) idle = 0;
      if (pair == rank) send_for(seconds, (rank + 1) % size, out);
      if ((pair + 1) % size == rank) mine = receive(pair, in);
    }
    /* MPI waits by polling. Where nodes share cores, that would slow down the pairs that measure. */
    if (idle) usleep(seconds * 1e6);
    double got[size];
    MPI_Allgather(&mine, 1, MPI_DOUBLE, got, 1, MPI_DOUBLE, MPI_COMM_WORLD);
    for (int pair = round; pair < size; pair += rounds) {
      const double rate = got[(pair + 1) % size];
      if (wanted[pair] && rate > rates[pair]) rates[pair] = rate;
    }
  }
  free(out);
  free(in);
}

int main(int argc, char **argv) {
  int rank, size, sum = 0, wrong = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  float *values = malloc(sizeof(float) * COUNT);
  for (int i = 0; i < COUNT; i++) values[i] = rank + 1;
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  MPI_Allreduce(MPI_IN_PLACE, values, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  for (int i = 0; i < COUNT; i++) wrong += values[i] != size * (size + 1) / 2.0f;
  free(values);
  double rates[size];
  char wanted[size];
  for (int i = 0; i < size; i++) rates[i] = 0, wanted[i] = 1;
  if (argc > 4 && size > 1) {
    const double seconds = atof(argv[1]) / 1000, low = atof(argv[2]), high = atof(argv[3]);
    int pending = size;
    for (int attempt = 0; pending && attempt < atoi(argv[4]); attempt++) {
      measure(rank, size, attempt || size < 4 ? 2 : size / 2, wanted, seconds, rates);
      pending = 0;
      for (int i = 0; i < size; i++) pending += wanted[i] = rates[i] < low || rates[i] > high;
    }
  }
  if (rank == 0) {
    printf("{\"ranks\": %d, \"sum\": %d, \"wrong\": %d, \"gbps\": [", size, sum, wrong);
    for (int i = 0; argc > 4 && i < size; i++) printf("%s%.4f", i ? ", " : "", rates[i]);
    printf("]}\n");
  }
  MPI_Finalize();
  return wrong != 0;
}
