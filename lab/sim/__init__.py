"""What simulations add to the simulated worker, such as replays of recorded requests."""
