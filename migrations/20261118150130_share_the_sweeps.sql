-- Tenants share the looks of the sweepers: one of each, then a second of each, so that a tenant with ten thousand
-- turns that wait for its limit does not keep another tenant's one turn waiting.
set local lock_timeout = '5s';

create or replace function due_turns(p_limit integer) returns table (tenant_id uuid, id uuid)
language sql volatile security definer
set search_path = pg_catalog, public
as $$
  -- Otherwise in no order, so that nodes that look at the same time take different ones.
  (select t.tenant_id, t.id
     from turns t
    where t.state in ('running', 'waiting_client')
      and t.lease_until <= clock_timestamp()
      and (t.due_at is null or t.due_at <= clock_timestamp())
    order by row_number() over (partition by t.tenant_id order by random()), random()
    limit p_limit)
   union all
  (select t.tenant_id, t.id
     from turns t
    where t.state = 'queued'
      and (t.due_at is null or t.due_at <= clock_timestamp())
      and exists (select 1
                    from tenants n
                   where n.id = t.tenant_id
                     and n.state = 'active')
      -- Only the first of a queue, by whose failures the queue is put off.
      and not exists (select 1
                        from turns f
                       where f.tenant_id = t.tenant_id
                         and f.conversation_id = t.conversation_id
                         and f.state = 'queued'
                         and f.turn_no < t.turn_no)
      and not exists (select 1
                        from turns o
                       where o.tenant_id = t.tenant_id
                         and o.conversation_id = t.conversation_id
                         and o.state in ('running', 'waiting_client'))
    order by row_number() over (partition by t.tenant_id order by random()), random()
    limit p_limit)
$$;

create or replace function due_replies(p_limit integer) returns table (tenant_id uuid, id uuid)
language sql volatile security definer
set search_path = pg_catalog, public
as $$
  select t.tenant_id, t.id
    from turns t
   where t.reply_via = 'http'
     and t.ended_at is not null
     and coalesce(t.due_at, t.ended_at + interval '5 seconds') <= clock_timestamp()
   order by row_number() over (partition by t.tenant_id order by random()), random()
   limit p_limit
$$;
