# What the two macros of Android's policy that we use come to, for checkmodule.
define(`init_daemon_domain', `
allow init $1_exec:file { getattr open read execute map };
allow init $1:process { transition siginh rlimitinh };
allow $1 $1_exec:file { entrypoint open read execute getattr map };
type_transition init $1_exec:process $1;
')
define(`tmpfs_domain', `
type $1_tmpfs, file_type;
type_transition $1 tmpfs:file $1_tmpfs;
allow $1 $1_tmpfs:file { read write getattr map };
')
