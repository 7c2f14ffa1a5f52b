"""The scheduler: who is there, who may run, where each request's stages run, and what happens when one fails."""
