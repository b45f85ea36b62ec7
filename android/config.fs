# The service's own user, in the range of the system_ext partition (7500 to 7999): name it in
# TARGET_FS_CONFIG_GEN. Any free number of the range does.
[AID_SYSTEM_EXT_SWITCHGEAR]
value: 7542
