"""What everything stands on: errors, configuration, contract, state, processes, SSH."""
