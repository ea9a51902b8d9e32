"""What the engine under test is compared with. None of them uses the window machine or the proxy."""
