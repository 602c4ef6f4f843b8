"""What RLS costs on big networks and many processes, computed before anything is run."""
