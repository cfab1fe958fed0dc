"""The cost of work on a worker: step times, drafting times and the present speed."""
