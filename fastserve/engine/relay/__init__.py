"""The relay: requests of other front processes on schedulers that only the owner has."""
