/* Sums the rank numbers and a large vector over all processes, and prints what came out as JSON. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
  int rank, size, sum = 0, wrong = 0;
  const int count = argc > 1 ? atoi(argv[1]) : 1000000;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  float *values = malloc(sizeof(float) * count);
  for (int i = 0; i < count; i++) values[i] = rank + 1;
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  for (int i = 0; i < count; i++) wrong += values[i] != size * (size + 1) / 2.0f;
  if (rank == 0) printf("{\"ranks\": %d, \"sum\": %d, \"wrong\": %d}\n", size, sum, wrong);
  free(values);
  MPI_Finalize();
  return wrong != 0;
}
