"""What a run keeps: trials, the folder they lie in, and the points they merge into."""
