"""The costs of RLS on large networks and many processes, estimated before a run."""
