"""imec GPULab: containers on shared GPU machines. A cluster there is a set of jobs, driven through gpulab-cli."""
