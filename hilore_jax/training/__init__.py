"""Training: tasks, rollouts, one pure actor update, and the loop around it."""
