"""The harness: scenarios run by an engine under test and by references, traces compared, differences explained."""
