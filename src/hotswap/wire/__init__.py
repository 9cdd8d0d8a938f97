"""How the processes of a job talk: authentication, frames, typed messages, links. Free of torch."""
