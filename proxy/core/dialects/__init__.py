"""What continuation means in one upstream API. Event and item names are compared here and nowhere else."""
