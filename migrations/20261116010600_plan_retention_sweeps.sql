-- Tenants could set a retention before there was a sweep: theirs is planned here. From now on whoever
-- sets a retention plans it.
insert into jobs (id, tenant_id, kind, run_at)
select gen_random_uuid(), id, 'sweep_conversations', now()
  from tenants
 where settings #>> '{retention,conversations_days}' is not null
   and state <> 'deleting'
    on conflict on constraint jobs_once do nothing;
