"""Predict how training scales on a cluster, with an interval that says how sure the prediction is."""
