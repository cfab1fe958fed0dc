"""What work costs on a worker: step times, the time of drafting, and present speed."""
