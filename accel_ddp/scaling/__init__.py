"""`accel-ddp scaling` measures how a recipe scales over ranks and nodes. `command` and `options` are the command line. `plan` chooses
the settings to measure, and `runs` launches the recipe for each of them, on this machine or through `accel-ddp launch`. `measurement`
reads the log of a run. `analysis` and `advice` compute efficiencies, what limits them and which batch would reach 90 %. `prediction`
asks the doctor for the speed of the links. `output` and `page` show the results. No module imports torch. The package may import
`doctor`, `launch`, `report`, `records`, `recipe_files` and the lowest layer (`errors`, `environment`, `config`, `net`)."""
