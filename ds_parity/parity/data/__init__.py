"""The rollouts and the models that scenarios are made of."""
