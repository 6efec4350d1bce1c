"""What faults cost an elastic run: seconds until the next step, steps lost, images per second before and after."""
