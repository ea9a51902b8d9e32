"""Parts of train_online.py: the task, the queue, the actors, what arrives at a rank, the account, and the replay."""
