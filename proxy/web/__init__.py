"""HTTP towards the client: passes on, starts tasks, lets them be read and told."""
