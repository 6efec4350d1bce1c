"""imec GPULab: containers on shared GPU machines. A cluster is a set of jobs, managed with gpulab-cli."""
