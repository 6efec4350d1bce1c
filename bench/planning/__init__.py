"""Plan a cluster, its data path, a training run or a copy of a data set before paying for it."""
