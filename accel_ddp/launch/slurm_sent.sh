# The values of these variables are not in this file. `accel-ddp launch` gives them to sbatch in its environment.
for name in @names; do
    if [ -z "${!name+set}" ]; then
        echo "error: the variable $name is not set. Submit the job with accel-ddp launch, or export the variables of" \
            @files >&2
        exit @user_error
    fi
done
