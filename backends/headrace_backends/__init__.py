"""The backend programs: each loads one model version in a process of its own and runs batches on it."""
