"""An existing Slurm cluster: jobs of an ordinary user instead of nodes of our own."""
